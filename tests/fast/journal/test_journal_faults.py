"""Reports never raise for a disk that fails and never vanish: they are kept, or close() says how many were not."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import ReportsLost
from det_core.journal import Journal, RunFolder, list_runs, read_run
from support.disks import fill, small_disk
from support.journals import Os, failing, lines, open_journal, written


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again with the next report, look at the link count with each."""
    monkeypatch.setattr("det_core.journal._file.RETRY_INTERVAL", 0.0)
    monkeypatch.setattr("det_core.journal._file.DELETION_CHECK_INTERVAL", 0.0)


def few_bytes(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """So many bytes of reports wait in memory at most."""
    monkeypatch.setattr("det_core.journal._file.BACKLOG_LIMIT", limit)


def scenario(folder: Path, journal: Journal, *, delete: bool = False) -> int:
    """Twelve records; half-way the folder may go away. Returns how many close() says were not kept."""
    for step in range(4):
        journal.metrics("training", step, {"a": step, "b": "x" * step})
    journal.record("status", {"status": "half"})
    journal.flush()
    if delete:
        shutil.rmtree(folder, ignore_errors=True)
    for step in range(4, 10):
        journal.metrics("training", step, {"a": step, "b": "x" * step})
    journal.record("status", {"status": "done"})
    try:
        journal.close()
    except ReportsLost as e:
        count = re.match(r"lost (\d+) report\(s\): cannot write to", str(e))
        assert count and str(folder) in str(e)
        return int(count[1])
    return 0


def kept(folder: Path) -> int:
    """Return the number of the scenario's records that are on disk, and check each."""
    if not any(folder.glob("journal-*.jsonl")):
        return 0
    run = read_run(folder)
    for row in run.rows("training"):
        assert row.metrics == {"a": row.steps_completed, "b": "x" * (row.steps_completed or 0)}
    return len(run.rows("training")) + len(run.records("status"))


CODES = (errno.EIO, errno.ENOSPC)


@pytest.mark.parametrize(("part", "delete"), [(False, False), (True, True)], ids=["", "part-deleted"])
def test_one_failing_call_loses_no_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: bool, delete: bool
) -> None:
    for at in range(1000):
        folder = tmp_path / str(at)
        caplog.clear()
        with failing(at, code=CODES[at % 2], part=part) as system:
            assert scenario(folder, open_journal(folder), delete=delete) == 0
        assert kept(folder) == 12, (at, system.calls)
        assert sum("cannot write the journal" in r.message for r in caplog.records) <= 1
        if not system.failed:
            break
    assert at > 15


@pytest.mark.parametrize(("more", "delete"), [(1, True), (3, False), (10_000, False), (10_000, True)])
def test_repeated_failures_lose_as_many_reports_as_close_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: int, delete: bool
) -> None:
    for at in range(1000):
        folder = tmp_path / str(at)
        # With fstat and pread dead for good nobody could know what was in a deleted file.
        only = "open write fsync close unlink makedirs rename dup ftruncate" if delete else ""
        caplog.clear()
        with failing(at, more=more, part=at % 3 == 0, only=only) as system:
            lost = scenario(folder, open_journal(folder), delete=delete)
        assert kept(folder) + lost >= 12, (at, system.calls)
        if not delete:
            assert kept(folder) + lost == 12, (at, system.calls)
        warnings = [r for r in caplog.records if "cannot write the journal" in r.message]
        assert len(warnings) <= 1
        if not system.failed:
            break
    assert at > 15


def test_reports_on_a_dead_disk_return_and_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_bytes(monkeypatch, 2000)
    with failing(0, more=10**9, code=errno.ENOSPC):
        journal = open_journal(tmp_path / "run")
        for step in range(500):
            journal.metrics("training", step, {"loss": step})
        assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
            f"cannot write the journal in {tmp_path / 'run'} (No space left on device): keeping up to 0 MB of reports "
            "in memory, and retrying"
        ]
        with pytest.raises(ReportsLost, match=r"lost 500 report\(s\): cannot write to .*run: No space left on device"):
            journal.close()
    assert not (tmp_path / "run").exists()


def test_backlog_over_its_limit_counts_lost_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_bytes(monkeypatch, 1000)
    with failing(5, more=10_000, only="write") as system:
        journal = open_journal(tmp_path)
        for step in range(200):
            journal.metrics("training", step, {"loss": step})
        system.mend()
        with pytest.raises(ReportsLost) as e:
            journal.close()
    found = written(tmp_path)
    assert 3 < len(found) < 200
    assert list(found) == list(range(len(found)))
    assert f"{200 - len(found)} report(s)" in str(e.value)


@pytest.mark.parametrize("what", ["file", "folder", "home"])
def test_deleted_journal_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.journal._file.DELETION_CHECK_INTERVAL", 3600.0)  # only flush and close look
    folder = tmp_path / "home" / "runs" / "r"
    journal = open_journal(folder)
    for step in range(1000):
        journal.metrics("training", step, {"a": step})
        if step % 250 == 100:
            before = (folder / "journal-0-0.jsonl").read_bytes()
            gone = {"file": folder / "journal-0-0.jsonl", "folder": folder, "home": tmp_path / "home"}[what]
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        if step % 250 == 200:
            journal.flush()
            assert len(written(folder)) == step + 1
            assert (folder / "journal-0-0.jsonl").read_bytes().startswith(before), "a cursor may stand in it"
    with pytest.raises(ValueError, match="step 30, key 'a' changed from 30"):
        journal.metrics("training", 30, {"a": 1})
    journal.close()
    assert written(folder) == {step: {"a": step} for step in range(1000)}
    assert [path.name for path in folder.iterdir()] == ["journal-0-0.jsonl"]
    assert f"restored deleted journal file {folder}" in caplog.text


@pytest.mark.usefixtures("quick_retries")
def test_run_deleted_while_written_keeps_its_name(home: Path) -> None:
    run = RunFolder.create(home, name="job")
    run.begin_restart({"argv": ["python", "train.py"]})
    before = (run.path / "run.json").read_bytes()
    journal = Journal(run.path, run_id=run.run_id, restart=0, rank=0)
    journal.metrics("training", 1, {"a": 1})
    shutil.rmtree(run.path)
    journal.metrics("training", 2, {"a": 2})
    journal.record("run_end", {"outcome": "completed"})
    journal.close()
    run.release()
    assert json.loads((run.path / "run.json").read_bytes()) == json.loads(before)
    (found,) = list_runs(home)
    assert (found.name, found.state, found.argv) == ("job", "completed", ["python", "train.py"])
    assert written(run.path) == {1: {"a": 1}, 2: {"a": 2}}


@pytest.mark.parametrize("look", ["with each report", "at the flush and the close"])
@pytest.mark.parametrize("again", [False, True])
def test_run_directory_moved_while_written_is_restored(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, look: str, again: bool
) -> None:
    """Later checkpoints went to a folder that no list showed, and reports to another one."""
    monkeypatch.setattr("det_core.journal._file.DELETION_CHECK_INTERVAL", 0.0 if look == "with each report" else 3600.0)
    run = RunFolder.create(home, name="job")
    run.begin_restart()
    journal = Journal(run.path, run_id=run.run_id, restart=0, rank=0)
    for step in range(5):
        journal.metrics("training", step, {"a": step})
    run.path.rename(home / "moved")
    if again:  # as the next checkpoint's folder
        run.path.mkdir()
    for step in range(5, 10):
        journal.metrics("training", step, {"a": step})
    journal.flush()
    journal.metrics("training", 10, {"a": 10})
    journal.record("run_end", {"outcome": "completed"})
    journal.close()
    run.release()
    assert written(run.path) == {step: {"a": step} for step in range(11)}
    (summary,) = list_runs(home)
    assert (summary.name, summary.state) == ("job", "completed")
    (warning,) = caplog.records
    assert f"was moved to {home / 'moved' / 'journal-0-0.jsonl'} while it was written" in warning.message


@pytest.mark.parametrize("size", [0, 300, "all but a byte"])
@pytest.mark.parametrize("look", ["with each report", "at the flush and the close"])
@pytest.mark.parametrize("outcome", ["completed", "failed"])
def test_journal_truncated_while_written_makes_run_incomplete(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: Any, look: str, outcome: str
) -> None:
    monkeypatch.setattr("det_core.journal._file.DELETION_CHECK_INTERVAL", 0.0 if look == "with each report" else 3600.0)
    run = RunFolder.create(home, name="job")
    run.begin_restart()
    journal = Journal(run.path, run_id=run.run_id, restart=0, rank=0)
    for step in range(5):
        journal.metrics("training", step, {"a": step})
    path = run.path / "journal-0-0.jsonl"
    os.truncate(path, path.stat().st_size - 1 if size == "all but a byte" else size)
    for step in range(5, 50):  # it becomes larger than it was
        journal.metrics("training", step, {"a": step})
    journal.flush()
    journal.metrics("training", 50, {"a": 50})
    journal.record("run_end", {"outcome": outcome})
    journal.close()
    run.release()
    record = read_run(run.path)
    assert set(range(6, 51)) <= set(written(run.path))
    assert record.state == ("failed" if outcome == "failed" else "incomplete")
    assert record.records("run_end")[-1]["detail"] == (
        "not all reports were kept: the journal was truncated by another process"
    )
    (warning,) = caplog.records
    assert f"{path} was truncated to" in warning.message


@pytest.mark.usefixtures("quick_retries")
def test_changing_inode_numbers_do_not_count_as_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some file systems in user space give them."""

    class Unstable(Os):
        def stat(self, path: Path) -> os.stat_result:
            found = list(os.stat(path))
            found[stat.ST_INO] += 1
            return os.stat_result(found)

    monkeypatch.setattr("det_core.journal._file.os", Unstable())
    journal = open_journal(tmp_path)
    for step in range(5):
        journal.metrics("training", step, {"a": step})
    journal.close()
    assert len(lines(tmp_path)) == 6


def test_deleted_torn_file_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with failing(5, part=True, only="write"):
        monkeypatch.setattr("det_core.journal._file.DELETION_CHECK_INTERVAL", 3600.0)
        monkeypatch.setattr("det_core.journal._file.RETRY_INTERVAL", 3600.0)
        journal = open_journal(folder)
        for step in range(6):  # header, reserve and three rows are whole, the fourth is torn, the others wait in memory
            journal.metrics("training", step, {"a": step})
        assert len(written(folder)) == 3
        shutil.rmtree(folder)
        journal.close()
    assert written(folder) == {step: {"a": step} for step in range(6)}
    assert read_run(folder).torn_lines == 1


def test_outcome_is_kept_with_a_full_backlog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_bytes(monkeypatch, 500)
    with failing(5, more=10_000, only="write") as system:
        journal = open_journal(tmp_path)
        for step in range(100):
            journal.metrics("training", step, {"a": step})
        journal.record("checkpoint", {"storage_id": "x"})
        journal.record("run_end", {"outcome": "completed"})
        system.mend()
        with pytest.raises(ReportsLost):
            journal.close()
    run = read_run(tmp_path)
    assert run.state == "incomplete" and [r["storage_id"] for r in run.records("checkpoint")] == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["journal-0-0.jsonl"], "there was room in the end"


def test_directory_that_cannot_be_restored_raises_at_close(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    journal = open_journal(folder)
    for step in range(10):
        journal.metrics("training", step, {"a": step})
    shutil.rmtree(folder)
    folder.write_text("in the way")
    for step in range(10, 20):
        journal.metrics("training", step, {"a": step})
    with pytest.raises(ReportsLost, match=r"lost 20 report\(s\): cannot write to .*run: (File exists|Not a directory)"):
        journal.close()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_pipe_or_directory_in_place_of_the_journal_blocks_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal-0-0.jsonl"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": 1})
    with pytest.raises(ReportsLost, match=r"lost 1 report\(s\): cannot write"):
        journal.close()


@pytest.mark.usefixtures("quick_retries")
def test_disk_full_for_a_while_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        journal = open_journal(disk / "run")
        journal.metrics("training", 0, {"a": 0})
        filler = fill(disk)
        for step in range(1, 1000):
            journal.metrics("training", step, {"a": step})
        assert len(list((disk / "run").iterdir())) <= 2  # no litter
        filler.unlink()
        journal.metrics("training", 1000, {"a": 1000})
        assert written(disk / "run") == {step: {"a": step} for step in range(1001)}
        journal.close()


@pytest.mark.parametrize(
    ("outcome", "state"), [("completed", "incomplete"), ("stopped", "incomplete"), ("failed", "failed")]
)
def test_disk_full_to_the_end_keeps_the_outcome_in_the_reserve(tmp_path: Path, outcome: str, state: str) -> None:
    """The run was shown as one that died, although it said completed. How it ended goes into room kept for that."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        journal = open_journal(disk / "run")
        for step in range(10_000):
            journal.metrics("training", step, {"a": step})
            if step % 1000 == 0:
                journal.record("checkpoint", {"storage_id": str(step)})
        journal.record("run_end", {"outcome": outcome})
        with pytest.raises(ReportsLost, match=r"No space left on device|only part of a line") as e:
            journal.close()
        found, run = written(disk / "run"), read_run(disk / "run")
        assert list(found) == list(range(len(found)))
        assert 100 < len(found) < 10_000
        assert f"{10_000 - len(found)} report(s)" in str(e.value), "rows: all records are there"
        assert [int(r["storage_id"]) for r in run.records("checkpoint")] == [*range(0, 10_000, 1000)]
        assert run.state == state and run.records("run_end")[-1]["detail"].startswith("not all reports were kept: ")
        assert not list((disk / "run").glob("*.reserve"))


def test_reserve_of_a_killed_process_is_removed_by_the_next_restart(home: Path) -> None:
    run = RunFolder.create(home, name="job")
    run.begin_restart()
    journal = Journal(run.path, run_id=run.run_id, restart=0, rank=0)
    journal.record("status", {"status": "x"})
    assert [path.stat().st_size for path in run.path.glob("*.reserve")] == [65536]
    run.release()
    run.begin_restart()
    assert not list(run.path.glob("*.reserve"))
    run.release()
    journal.close()


def test_disk_full_at_any_byte_of_a_line_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = set()
    for room in range(400, 900):
        folder = tmp_path / str(room)
        monkeypatch.setattr("det_core.journal._file.os", _Room(room))
        journal = open_journal(folder)
        for step in range(10):
            journal.metrics("training", step, {"a": step})
        with pytest.raises(ReportsLost) as e:
            journal.close()
        counts.add(len(written(folder)))
        assert f"{10 - len(written(folder))} report(s)" in str(e.value)
    assert {2, 3, 4} < counts


class _Room(Os):
    """A disk that takes so many bytes, and none to be kept for the end."""

    def __init__(self, room: int) -> None:
        self._room = room

    def write(self, fd: int, data: bytes) -> int:
        """As much as there is room for."""
        if not self._room or not data.strip(b"\0"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = os.write(fd, data[: self._room])
        self._room -= done
        return done


def test_report_during_a_slow_flush_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``flush()`` held the lock for as long as fsync took."""
    syncing, go_on = threading.Event(), threading.Event()

    class Slow(Os):
        def fsync(self, fd: int) -> None:
            syncing.set()
            go_on.wait()

    monkeypatch.setattr("det_core.journal._file.os", Slow())
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": 1})
    flushing = threading.Thread(target=journal.flush)
    flushing.start()
    syncing.wait()
    journal.metrics("training", 2, {"a": 2})
    assert flushing.is_alive() and list(written(tmp_path)) == [1, 2]
    go_on.set()
    flushing.join()
    journal.close()


def test_flush_syncs_file_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []

    class Noting(Os):
        def fsync(self, fd: int) -> None:
            os.fsync(fd)
            synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))

    monkeypatch.setattr("det_core.journal._file.os", Noting())
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": 1})
    assert synced == []
    journal.flush()
    assert synced == [False, True]
    journal.close()


def test_signal_handler_during_a_write_may_raise_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(Os):
        def __init__(self) -> None:
            self.todo: list[Any] = []

        def write(self, fd: int, data: bytes) -> int:
            done = os.write(fd, data)
            if self.todo:
                self.todo.pop()()
            return done

    def interrupt() -> None:
        raise KeyboardInterrupt

    system = Interrupting()
    monkeypatch.setattr("det_core.journal._file.os", system)
    journal = open_journal(tmp_path)
    journal.metrics("training", 0, {"a": 0})
    system.todo = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        journal.metrics("training", 1, {"a": 1})
    system.todo = [lambda: journal.metrics("training", 3, {"a": 3})]
    journal.metrics("training", 2, {"a": 2})
    with pytest.raises(ValueError, match="step 3, key 'a' changed from 3 to"):
        journal.metrics("training", 3, {"a": -1})
    journal.metrics("training", 4, {"a": 4})
    for step in range(5):
        journal.metrics("training", step, {"a": step})
        if step != 1:  # its call did not return
            with pytest.raises(ValueError, match="reported values are immutable"):
                journal.metrics("training", step, {"a": -1})
    journal.close()
    assert written(tmp_path) == {step: {"a": step} for step in range(5)}
    seqs = [int(n) for line in lines(tmp_path) for n in re.findall(rb'"seq":(\d+)', line)]
    assert len(seqs) == len(set(seqs))


def test_forked_child_writes_nothing_into_its_parents_file(tmp_path: Path) -> None:
    from det_core.errors import ContextClosed

    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": 1})
    before = lines(tmp_path)
    child = os.fork()
    if not child:
        code = 1
        try:
            for group in ("training", "validation"):
                try:
                    journal.metrics(group, 2, {"a": 2})
                except ContextClosed as e:
                    code = 0 if "forked" in str(e) else 3
            journal.flush()
            journal.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert lines(tmp_path) == before
    journal.metrics("training", 2, {"a": 2})
    journal.close()
    assert written(tmp_path) == {1: {"a": 1}, 2: {"a": 2}}
