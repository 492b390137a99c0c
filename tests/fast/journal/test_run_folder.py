"""The run's folder and the right to write it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from det_core import _clock
from det_core.errors import RunError, RunLocked, RunNotFound
from det_core.journal import Journal, RunFolder, RunSummary, list_runs, lock_run

HOLDER = """
import os, sys, time
from pathlib import Path
from det_core.journal import RunFolder
folder = RunFolder.open(Path(sys.argv[1]), sys.argv[2])
folder.begin_restart()
if sys.argv[3] == "fork" and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def holder(home: Path, run_id: str, how: str = "plain") -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home), run_id, how], stdout=subprocess.PIPE, start_new_session=True
    )
    stdout: IO[bytes] | None = child.stdout
    assert stdout and int(stdout.readline()) == child.pid
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert child.stdout
    child.stdout.close()


def test_create_makes_directory_and_run_json(home: Path) -> None:
    folder = RunFolder.create(home, name="job")
    assert re.fullmatch(r"\d{8}-\d{6}-[a-z0-9]{6}", folder.run_id)
    assert folder.path == home / "runs" / folder.run_id
    assert (folder.name, folder.restart) == ("job", -1)
    assert folder.begin_restart({"argv": ["python", "x.py"]}) == folder.restart == 0
    folder.release()
    folder.release()
    info = json.loads((folder.path / "run.json").read_text())
    (start,) = info["restarts"]
    assert (start["argv"], start["pid"]) == (["python", "x.py"], os.getpid())
    assert info.keys() == {"run_id", "name", "created", "restarts"}  # the facts of a start are in restarts


def test_run_ids_sort_by_age_and_are_unique(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [1_800_000_000.0]
    monkeypatch.setattr(_clock, "now", lambda: moment[0])
    ids = []
    for _ in range(40):
        ids.append(RunFolder.create(home, name="job").run_id)
        moment[0] += 0.25
    assert len(set(ids)) == 40
    assert [run.run_id for run in list_runs(home)] == ids[::-1]


def test_begin_restart_counts_up(home: Path) -> None:
    run_id = RunFolder.create(home, name="job").run_id
    for restart in range(3):
        folder = RunFolder.open(home, run_id)
        assert folder.name == "job"
        assert folder.begin_restart() == restart
        folder.release()
    journal = Journal(folder.path, run_id=run_id, restart=8, rank=1)
    journal.record("status", {})
    journal.close()
    (folder.path / "run.json").unlink()
    assert folder.begin_restart() == 9
    folder.release()
    assert RunFolder.open(home, run_id).name == "job"


def test_latest_returns_newest_existing_run_of_that_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunFolder.latest(home, "a") is None
    made = {}
    for number, name in enumerate("abab"):
        monkeypatch.setattr(_clock, "now", lambda n=number: 1_800_000_000.0 + n)
        made[number] = RunFolder.create(home, name=name)
    newest = RunFolder.latest(home, "a")
    assert newest is not None and newest.run_id == made[2].run_id
    for child in made[2].path.iterdir():
        child.unlink()
    made[2].path.rmdir()
    older = RunFolder.latest(home, "a")
    assert older is not None and older.run_id == made[0].run_id
    assert RunFolder.latest(home, "c") is None


def test_open_by_prefix_returns_the_one_match(home: Path) -> None:
    for name in ("20261121-100000-aaaaaa", "20261121-100000-ab2222", "20261122-100000-aaaaaa"):
        (home / "runs" / name).mkdir(parents=True)
    assert RunFolder.open(home, "20261122").run_id == "20261122-100000-aaaaaa"
    assert RunFolder.open(home, "20261121-100000-ab").path.name == "20261121-100000-ab2222"
    with pytest.raises(RunNotFound, match=r"2 runs in .* begin with '20261121': .*-ab2222, .*; give more"):
        RunFolder.open(home, "20261121")


@pytest.mark.parametrize("run_id", ["nope", "", "..", "../runs", "a/b", "/etc", "."])
def test_open_of_unknown_run_raises_run_not_found(home: Path, run_id: str) -> None:
    RunFolder.create(home, name="job")
    with pytest.raises(RunNotFound, match="no run"):
        RunFolder.open(home, run_id)


def test_create_in_unwritable_home_raises_run_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(RunError, match="DET_CORE_HOME"):
        RunFolder.create(tmp_path / "home", name="job")


def test_second_writer_error_names_host_and_pid(home: Path) -> None:
    folder = RunFolder.create(home, name="job")
    child = holder(home, folder.run_id)
    try:
        with pytest.raises(
            RunLocked, match=rf"run {folder.run_id} is being written by pid {child.pid} on {os.uname().nodename}"
        ):
            folder.begin_restart()
        with pytest.raises(RunLocked), lock_run(folder.path):
            pass
        assert json.loads((folder.path / "run.json").read_text())["restarts"][-1]["restart"] == 0
    finally:
        end(child)
    assert folder.begin_restart() == 1
    folder.release()


def test_second_writer_in_one_process_is_rejected(home: Path) -> None:
    one = RunFolder.create(home, name="job")
    one.begin_restart()
    two = RunFolder.open(home, one.run_id)
    with pytest.raises(RunLocked, match=f"pid {os.getpid()}"):
        two.begin_restart()
    one.release()
    assert two.begin_restart() == 1
    two.release()


def test_forked_child_releases_the_lock(home: Path) -> None:
    """DataLoader workers outlive a training process that is killed."""
    folder = RunFolder.create(home, name="job")
    child = holder(home, folder.run_id, "fork")
    try:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert folder.begin_restart() == 1
        folder.release()
    finally:
        end(child)


def test_is_live_takes_no_lock(home: Path) -> None:
    folder = RunFolder.create(home, name="job")
    assert not RunSummary(folder.path).live
    folder.begin_restart()
    for _ in range(3):
        assert RunSummary(folder.path).live
    with pytest.raises(RunLocked):
        RunFolder.open(home, folder.run_id).begin_restart()
    folder.release()
    assert not RunSummary(folder.path).live


def test_run_json_with_a_failing_disk_is_complete_or_absent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(home, name="job")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RunError, match=f"cannot write run {folder.run_id} .*: No space left"):
            folder.begin_restart()
    assert json.loads((folder.path / "run.json").read_text())["restarts"] == []
    assert not RunSummary(folder.path).live
    assert folder.begin_restart() == 0
    folder.release()
