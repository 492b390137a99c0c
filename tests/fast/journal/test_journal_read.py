"""Reading a run back: damaged files, several ranks, several restarts, its state."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.errors import RunNotFound
from det_core.journal import RunFolder, list_runs, open_cursors, read_run
from support.journals import lines, one_run, open_journal, written


def journal_of(folder: Path, count: int) -> bytes:
    journal = open_journal(folder)
    for step in range(count):
        journal.metrics("training", step, {"a": step * 1.5, "b": float("nan")})
        journal.record("status", {"status": f"s{step}"})
    journal.close()
    return (folder / "journal-0-0.jsonl").read_bytes()


damage = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert"]), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
    min_size=1,
    max_size=6,
)


@given(damage, st.booleans())
def test_damaged_lines_hide_no_others(hits: list[tuple[str, float, int]], truncate: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = journal_of(folder, 12)
        data = bytearray(whole)
        for how, where, byte in hits:
            at = int(where * len(data))
            if how == "flip":
                data[at] ^= byte
            elif how == "cut":
                del data[at : at + byte]
            else:
                data[at:at] = bytes([byte]) * 3
            if not data:
                break
        if truncate:
            data = data[: len(data) // 2]
        (folder / "journal-0-0.jsonl").write_bytes(bytes(data))
        run = read_run(folder)
        intact = set(whole.split(b"\n")) & set(bytes(data).split(b"\n"))
        expected = {i for i in range(12) if any(b'"steps_completed":%d,' % i in line for line in intact)}
        rows = {row.steps_completed: row.metrics for g in run.groups() for row in run.rows(g)}
        assert all(rows[step]["a"] == step * 1.5 for step in expected)
        statuses = {r.get("status") for r in run.records("status")}
        assert {f"s{i}" for i in range(12) if any(b'"s%d"' % i in line for line in intact)} <= statuses
        assert run.state == "died"
        assert run.torn_lines <= len(bytes(data).split(b"\n"))


def test_torn_lines_anywhere_are_skipped_and_counted(tmp_path: Path) -> None:
    whole = journal_of(tmp_path, 4).split(b"\n")
    whole[0] = whole[0][:-5]  # the header
    whole[3] = whole[3][10:]  # the row of step 1
    whole.insert(5, b"\xff\xfe{")
    whole.insert(5, b"")
    (tmp_path / "journal-0-0.jsonl").write_bytes(b"\n".join(whole)[:-3])
    run = read_run(tmp_path)
    assert [row.steps_completed for row in run.rows("training")] == [0, 2, 3]
    assert [r["status"] for r in run.records("status")] == ["s0", "s1", "s2"]
    assert run.torn_lines == 4


FOREIGN = [
    b"[]",
    b"1",
    b"{}",
    b'{"kind":"metrics"}',
    b'{"kind":"metrics","seq":1,"time":1,"group":"g","steps_completed":-1,"metrics":{}}',
    b'{"kind":"metrics","seq":1,"time":1,"group":"g","steps_completed":99999999999999999999,"metrics":{}}',
    b'{"kind":"metrics","seq":true,"time":1,"group":"g","steps_completed":1,"metrics":{}}',
    b'{"kind":"metrics","seq":1,"time":1,"group":"g","steps_completed":1,"metrics":[]}',
    b'{"kind":"metrics","seq":1,"time":1,"group":"g","metrics":{}}',
    b'{"kind":"metrics","seq":1,"time":1,"group":"g","steps_completed":1,"metrics":{},"nonfinite":[["metrics","x"]]}',
    b'{"kind":"metrics","seq":1,"time":1,"group":"g","steps_completed":1,"metrics":{"x":1},"nonfinite":[["metrics","x"]]}',
    b'{"kind":"metrics","seq":1,"time":1,"group":"g","steps_completed":1,"metrics":{"x":"NaN"},"nonfinite":[3]}',
    b'{"kind":"status","seq":1,"time":1,"body":3}',
    b'{"kind":"status","seq":-1,"time":1,"body":{}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("line", FOREIGN)
def test_json_of_another_shape_counts_as_torn(tmp_path: Path, line: bytes) -> None:
    journal_of(tmp_path, 2)
    with open(tmp_path / "journal-0-0.jsonl", "ab") as f:
        f.write(line + b"\n")
    run = read_run(tmp_path)
    assert run.torn_lines == 1
    assert run.groups() == ["training"]
    assert len(run.rows("training")) == 2


def test_duplicated_record_counts_once(tmp_path: Path) -> None:
    data = journal_of(tmp_path, 5)
    (tmp_path / "journal-0-0.1.jsonl").write_bytes(b"\n" + data)
    run = read_run(tmp_path)
    assert len(run.rows("training")) == 5
    assert len(run.records("status")) == 5
    assert run.torn_lines == 0


def test_rows_of_several_ranks_at_one_step_are_merged(tmp_path: Path) -> None:
    for rank in (1, 0, 2):
        journal = open_journal(tmp_path, rank=rank)
        for step in (1, 2):
            journal.metrics("training", step, {"loss": 1.0, f"rank{rank}": step, "mine": rank if step == 2 else 0})
        journal.metrics("cpu", None, {"util": rank})
        journal.close()
    one, two = read_run(tmp_path).rows("training")
    assert one.metrics == {"loss": 1.0, "rank0": 1, "rank1": 1, "rank2": 1, "mine": 0}
    assert (one.rank, one.conflicts) == (0, ())
    assert two.metrics == {"loss": 1.0, "rank0": 2, "rank1": 2, "rank2": 2, "mine": 0}
    assert two.conflicts == ("mine",)
    assert [row.metrics["util"] for row in read_run(tmp_path).rows("cpu")] == [0, 1, 2]


def test_run_with_more_ranks_than_open_files_is_read(tmp_path: Path) -> None:
    for rank in range(120):
        journal = open_journal(tmp_path, rank=rank)
        for step in range(2):
            journal.metrics("training", step, {f"of rank {rank}": step})
        journal.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, hard))
    try:
        found = written(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {step: len(metrics) for step, metrics in found.items()} == {0: 120, 1: 120}


def test_rows_are_ordered_by_step_and_those_without_by_report(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for step in (5, 1, None, 3, None):
        journal.metrics("g", step, {"a": step})
    journal.close()
    assert [row.steps_completed for row in read_run(tmp_path).rows("g")] == [1, 3, 5, None, None]
    assert read_run(tmp_path).rows("h") == []


def test_resumed_run_supersedes_repeated_steps(tmp_path: Path) -> None:
    for restart, first, last in ((0, 1, 80), (1, 51, 70), (2, 61, 100)):
        journal = open_journal(tmp_path, restart=restart)
        if restart:
            journal.record("restore", {"storage_id": "x", "steps_completed": first - 1})
        for step in range(first, last + 1):
            journal.metrics("training", step, {"r": restart})
            if step % 20 == 0:
                journal.metrics("validation", step, {"r": restart})
        journal.metrics("cpu", None, {"r": restart})
        journal.close()
        assert list(written(tmp_path)) == list(range(1, last + 1))
    found = written(tmp_path)
    assert [found[s]["r"] for s in (50, 51, 60, 61, 100)] == [0, 1, 1, 2, 2]
    assert {s: m["r"] for s, m in written(tmp_path, "validation").items()} == {20: 0, 40: 0, 60: 1, 80: 2, 100: 2}
    run = read_run(tmp_path)
    assert len(run.rows("cpu")) == 3
    everything = run.rows("training", superseded=True)
    assert len(everything) == 80 + 20 + 40
    assert sum(row.superseded for row in everything) == 40
    assert run.starts == 3


def test_rows_beyond_a_restored_step_are_superseded_at_once(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for step in range(1, 11):
        journal.metrics("training", step, {"a": step})
    journal.close()
    journal = open_journal(tmp_path, restart=1)
    journal.record("restore", {"storage_id": "x", "steps_completed": 4})
    assert list(written(tmp_path)) == [1, 2, 3, 4]
    journal.metrics("training", 8, {"a": 8})
    journal.close()
    assert list(written(tmp_path)) == [1, 2, 3, 4, 8]


@pytest.mark.parametrize("outcome", ["completed", "failed", "preempted"])
def test_state_of_an_ended_run_is_its_outcome(home: Path, outcome: str) -> None:
    run = one_run(home, outcome=outcome)
    assert run.state == outcome
    folder = RunFolder.open(home, run.run_id)
    folder.begin_restart()
    assert read_run(run.path).state == "running"
    folder.release()
    assert read_run(run.path).state == "died"  # the new restart ended without a word


def test_state_of_a_killed_run_is_died(home: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from det_core.journal import *\n"
        "folder = RunFolder.create(Path(sys.argv[1]), name='x'); folder.begin_restart()\n"
        "print(folder.run_id, flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(home)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    with child, child.stdout:
        path = home / "runs" / child.stdout.readline().strip()
        assert read_run(path).state == "running"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert read_run(path).state == "died"


def test_records_are_sorted_and_properties_return_the_last(tmp_path: Path) -> None:
    for restart in (0, 1):
        journal = open_journal(tmp_path, restart=restart)
        for n in (1, 2):
            journal.record("status", {"status": f"{restart}.{n}"})
            journal.record("progress", {"fraction": n / 4})
            journal.record("metadata", {"metadata": {"n": [n, {"inf": float("inf")}]}})
        journal.close()
    run = read_run(tmp_path)
    assert run.status == "1.2"
    assert run.progress == 0.5
    assert run.metadata == {"n": [2, {"inf": float("inf")}]}
    records = run.records("status")
    assert [(r.restart, r.rank, r.seq, r.kind) for r in records] == [(0, 0, 0, "status"), (0, 0, 3, "status")] + [
        (1, 0, 0, "status"),
        (1, 0, 3, "status"),
    ]
    assert dict(records[0]) == {"status": "0.1"}
    assert "0.1" in repr(records[0])


def test_run_without_run_json_is_read(home: Path) -> None:
    run = one_run(home)
    (run.path / "run.json").unlink()
    again = read_run(run.path)
    assert (again.run_id, again.name, again.starts, again.state) == (run.run_id, "", 1, "completed")
    assert len(again.rows("training")) == 3
    assert [r.run_id for r in list_runs(home)] == [run.run_id]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_broken_run_json_is_ignored(home: Path, content: bytes) -> None:
    run = one_run(home)
    (run.path / "run.json").write_bytes(content)
    again = read_run(run.path)
    assert (again.name, again.starts, again.created) == ("", 1, 0.0)
    (listed,) = list_runs(home)
    assert listed.state == "completed"


def test_directory_without_a_run_raises_run_not_found(tmp_path: Path, home: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunNotFound, match=str(path)):
            read_run(path)
    assert list_runs(home) == []
    (home / "runs" / "empty").mkdir(parents=True)
    (home / "runs" / "a file").write_text("")
    assert list_runs(home) == []


@pytest.mark.parametrize("name", ["journal-0-0.jsonl", "journal-0-1.jsonl", "run.json", "run.lock"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_damaged_run_hides_no_other_run(home: Path, caplog: pytest.LogCaptureFixture, name: str, kind: str) -> None:
    """A folder in a journal's place broke the list of all runs, and a pipe made it wait for ever."""
    other, damaged = one_run(home), one_run(home)
    path = damaged.path / name
    path.unlink(missing_ok=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    runs = {run.run_id: run.state for run in list_runs(home)}
    assert runs.keys() == {other.run_id, damaged.run_id} and runs[other.run_id] == "completed"
    assert read_run(damaged.path).state == ("died" if name.startswith("journal") else "completed")
    assert f"ignoring {path}: not a regular file" in caplog.text
    assert len(read_run(damaged.path).rows("training")) == (0 if name == "journal-0-0.jsonl" else 3)
    for cursor in open_cursors(damaged.path):
        assert cursor.count_remaining() == len(cursor.read())


WRITER = """
import os, sys
from pathlib import Path
from det_core.journal import Journal
journal = Journal(Path(sys.argv[1]), run_id="r", restart=int(sys.argv[2]), rank=0)
step = 0
while True:
    step += 1
    journal.metrics("training", step, {"a": step, "b": "x" * (step % 300)})
    if step % 5 == 0:
        journal.metrics("validation", step, {"a": float(step)})
    os.write(1, b"%d\\n" % step)
"""


def kill_once(folder: Path, restart: int, after: int) -> None:
    """Kill a writer after it acknowledged ``after`` reports; check that each acknowledged one is there."""
    command = [sys.executable, "-c", WRITER, str(folder), str(restart)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout
        seen = 0
        for line in child.stdout:
            seen = int(line)
            if seen == after:
                os.kill(child.pid, signal.SIGKILL)
        child.wait()
    rows = [row for row in read_run(folder).rows("training", superseded=True) if row.restart == restart]
    assert [row.steps_completed for row in rows][:seen] == list(range(1, seen + 1))
    assert all(row.metrics == {"a": s, "b": "x" * (s % 300)} for row in rows if (s := row.steps_completed or 0))
    validated = [row for row in read_run(folder).rows("validation", superseded=True) if row.restart == restart]
    assert len(validated) >= seen // 5


@pytest.mark.parametrize("after", [1, 17, 400])
def test_returned_report_survives_kill_9(tmp_path: Path, after: int) -> None:
    kill_once(tmp_path, 0, after)
    assert read_run(tmp_path).torn_lines <= 1  # the report under way, whose call had not returned


def test_every_line_ends_with_a_newline(tmp_path: Path) -> None:
    journal_of(tmp_path, 3)
    assert len(lines(tmp_path)) == 7
    assert (tmp_path / "journal-0-0.jsonl").read_bytes().endswith(b"\n")
