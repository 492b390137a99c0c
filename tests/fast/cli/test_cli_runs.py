"""``det-core runs`` as a person or a script runs it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from det_core import core
from det_core.journal import Journal, RunFolder
from det_core.storage import DirectoryStore, Owner
from support.commands import det_core
from support.journals import one_run, rich_run
from support.stored import put, run_with_checkpoints


def test_list(home: Path) -> None:
    assert "no runs in " in det_core("runs", "list").stderr
    assert json.loads(det_core("runs", "list", "--json").stdout) == []
    ids = [one_run(home, name=name).run_id for name in ("/a/b/train.py", "other", "/c/train.py")]
    lines = det_core("runs", "list").stdout.splitlines()
    assert lines[0].split() == ["RUN", "STATE", "STARTED", "RESUMED", "NAME"]
    assert [line.split()[0] for line in lines[1:]] == ids[::-1]
    assert lines[1].split()[1] == "completed"
    assert lines[1].endswith("/c/train.py")
    rows = json.loads(det_core("runs", "list", "--json", "--name", "train.py").stdout)
    assert [row["run_id"] for row in rows] == [ids[2], ids[0]]
    assert rows[0]["path"] == str(home / "runs" / ids[2])
    assert len(det_core("runs", "list", "--limit", 1).stdout.splitlines()) == 2
    assert det_core("runs", "list", "--home", home / "else", "--json").stdout.strip() == "[]"
    assert "'x' is not a valid integer" in det_core("runs", "list", "--limit", "x", check=2).stderr


def test_control_characters_of_names_are_escaped_for_people(home: Path) -> None:
    name = "a\x1b[2J\r\nb"
    run_id = one_run(home, name=name).run_id
    assert det_core("runs", "list").stdout.endswith("  a\\x1b[2J\\r\\nb\n")
    assert "name:        a\\x1b[2J\\r\nb\n" in det_core("runs", "show", run_id).stdout
    assert json.loads(det_core("runs", "list", "--json").stdout)[0]["name"] == name


def test_show(home: Path) -> None:
    run_id = rich_run(home)
    text = det_core("runs", "show", run_id[:12]).stdout
    assert f"DET_CORE_RESUME={run_id} python train.py 'a b'" in text
    for word in ("preempted", str(home / "runs" / run_id), "acc.top1", "-inf", "abc-1", "once"):
        assert word in text
    shown = json.loads(det_core("runs", "show", "latest", "--json").stdout)
    assert shown["groups"]["training"]["rows"] == 5
    assert shown["groups"]["training"]["last"]["metrics"]["acc"] == {"top1": 5, "bad": "-Infinity"}
    assert [c["storage_id"] for c in shown["checkpoints"]] == ["abc-0", "abc-1"]
    assert (shown["state"], shown["restarts"], shown["torn_lines"]) == ("preempted", 1, 0)
    assert shown["metadata"] == {"note": "x"}


def test_show_says_how_a_run_was_started_and_why_it_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_CORE_COMMAND", "python fit.py")
    with pytest.raises(ValueError, match="bad"), core.init(hparams={"lr": 0.1, "net": {"depth": 3}}) as ctx:
        ctx.set_config({"seed": 7})
        raise ValueError("bad")
    facts = dict(re.findall(r"^(\S+): +(.*)$", det_core("runs", "show", "latest").stdout, re.MULTILINE))
    assert facts["because"] == "ValueError: bad"
    assert (facts["hparams.lr"], facts["hparams.net.depth"], facts["config.seed"]) == ("0.1", "3", "7")
    assert facts["directory"] == os.getcwd() and facts["host"] == os.uname().nodename
    assert facts["command"] == "python fit.py"
    shown = json.loads(det_core("runs", "show", "latest", "--json").stdout)
    assert (shown["detail"], shown["config"], shown["hparams"]["net"]) == ("ValueError: bad", {"seed": 7}, {"depth": 3})
    assert shown["start"]["argv"] == shown["argv"]


def test_ranks_that_disagree_are_told_of(home: Path) -> None:
    folder = RunFolder.create(home, name="job")
    folder.begin_restart()
    for rank in range(2):
        journal = Journal(folder.path, run_id=folder.run_id, restart=0, rank=rank)
        for step in range(1, 4):
            journal.metrics("training", step, {"loss": rank if step > 1 else 0, "same": 1, f"of_{rank}": 1})
        journal.close()
    folder.release()
    done = det_core("runs", "show", "latest")
    said = "training, step 3: ranks reported different values for loss; shown is the lowest rank's"
    assert done.stderr == f"det-core: {said}\n"
    assert json.loads(det_core("runs", "show", "latest", "--json").stdout)["groups"]["training"]["last"] == {
        "steps_completed": 3, "metrics": {"loss": 0, "same": 1, "of_0": 1, "of_1": 1}, "conflicts": ["loss"],
        "time": json.loads(det_core("runs", "show", "latest", "--json").stdout)["groups"]["training"]["last"]["time"],
    }  # fmt: skip
    for format in ("csv", "jsonl"):
        done = det_core("runs", "export", "latest", "--format", format)
        said = "ranks reported different values of training.loss for 2 step(s), first 2; the lowest rank's is kept"
        assert done.stderr == f"det-core: {said}\n"


def test_export_csv(home: Path) -> None:
    import pandas

    rich_run(home)
    text = det_core("runs", "export", "latest", "--format", "csv", "--group", "training").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["steps_completed"] for row in rows] == list("12345")
    assert [row["loss"] for row in rows] == [repr(1 / s) for s in range(1, 6)]
    assert (rows[0]["acc.bad"], rows[0]["words"], rows[4]["restart"]) == ("-Infinity", '["a", "b"]', "1")
    everything = pandas.read_csv(io.StringIO(det_core("runs", "export", "latest", "-f", "csv").stdout))
    assert list(everything["group"]) == ["training"] * 5 + ["validation"] * 2
    assert everything["acc.bad"][0] == -math.inf


def test_export_batches_and_superseded(home: Path) -> None:
    rich_run(home)
    arguments = ("runs", "export", "latest", "-g", "training", "--batches", "--superseded", "-f")
    rows = list(csv.DictReader(io.StringIO(det_core(*arguments, "csv").stdout)))
    assert len(rows) == 18
    assert [(r["batch"], r["x"], r["loss"]) for r in rows[:3]] == [("", "", "1.0"), ("0", "1", ""), ("1", "NaN", "")]
    assert [r["steps_completed"] for r in rows if r["superseded"] == "True" and not r["batch"]] == ["3"]
    records = [json.loads(line) for line in det_core(*arguments, "jsonl").stdout.splitlines()]
    assert len(records) == 6
    assert records[0]["batch_metrics"] == [{"x": 1}, {"x": "NaN"}]
    assert records[0]["nonfinite"] == [["metrics", "acc", "bad"], ["batch_metrics", 1, "x"]]
    assert [r["superseded"] for r in records] == [False, False, True, False, False, False]


def test_export_jsonl_needs_no_pandas(home: Path, tmp_path: Path) -> None:
    rich_run(home)
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['pandas', 'pyarrow', 'numpy', 'torch']))\n"
        "from det_core.cli import main\n"
        "for format in ('csv', 'jsonl', 'parquet'):\n"
        "    print(main(['runs', 'export', 'latest', '-f', format, '-o', f'out.{format}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "1"]
    for format in ("csv", "jsonl"):
        assert len((tmp_path / f"out.{format}").read_text().splitlines()) == 7 + (format == "csv")
    assert re.search(r"pip install .*\[data\]'", done.stderr)
    assert list(tmp_path.glob(".*")) == []


def test_export_parquet(home: Path, tmp_path: Path) -> None:
    rich_run(home)
    target = tmp_path / "out.parquet"
    det_core("runs", "export", "latest", "-f", "parquet", "-o", target, "--batches")
    import pandas

    frame = pandas.read_parquet(target)
    assert len(frame) == 17
    training = frame[(frame["group"] == "training") & frame["batch"].isna()]
    assert list(training["loss"]) == [1 / s for s in range(1, 6)]
    validation = frame[frame["group"] == "validation"]
    assert list(validation["ok"]) == [True, True]
    assert list(validation["name"]) == ["NaN", "NaN"]
    assert list(validation["big"]) == [float(2**64 - 1)] * 2
    assert list(frame["x"].dropna())[:2] == [1, 2]


def test_an_export_that_fails_leaves_nothing(home: Path, tmp_path: Path) -> None:
    rich_run(home)
    done = det_core("runs", "export", "latest", "-f", "csv", "-o", tmp_path / "no" / "x.csv", check=1)
    assert "No such file or directory" in done.stderr and f"{tmp_path}/no/" in done.stderr
    done = det_core("runs", "export", "latest", "-f", "csv", "-g", "nope", check=1)
    assert "has no group 'nope'; it has: training, validation" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(home: Path) -> None:
    one_run(home, steps=20_000)
    command = f"{sys.executable} -m det_core.cli runs export latest -f jsonl | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


def test_rm(home: Path) -> None:
    one, two, three = (one_run(home).run_id for _ in range(3))
    done = det_core("runs", "rm", one, check=2)
    assert "--yes" in done.stderr
    assert (home / "runs" / one).exists()
    done = det_core("runs", "rm", one, "nope", "--yes", check=1)
    assert "no run 'nope'" in done.stderr
    assert (home / "runs" / one).exists()
    det_core("runs", "rm", one, two, "--yes")
    assert [path.name for path in (home / "runs").iterdir()] == [three]


def test_rm_deletes_what_a_run_has_in_every_storage_it_was_given(home: Path, tmp_path: Path) -> None:
    """A resumed run may have been given another one. What others have there stays."""
    first, second = tmp_path / "first", tmp_path / "second folder"
    other, store = run_with_checkpoints(home, tmp_path, [10], storage=first)
    run_id, _ = run_with_checkpoints(home, tmp_path, [10, 20], storage=first)
    later = Journal(home / "runs" / run_id, run_id=run_id, restart=1, rank=0)
    later.record("run_start", {"storage": str(second)})
    later.record("checkpoint", {"storage_id": "torn"})
    later.close()
    put(DirectoryStore(second), "c30", 30, tmp_path, run_id=run_id, restart=1)
    put(DirectoryStore(second), "torn", 40, tmp_path, run_id=run_id, restart=1, ordinal=2)
    manifest = second / "torn" / ".det_core" / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text("{")
    for number, name in enumerate((other, run_id)):
        for place in (first, second):
            DirectoryStore(place).put_file(tmp_path / f"source-of-c{number + 1}0-{name[-6:]}" / "empty",
                                             f"tensorboard/{name}/rank-1/events")  # fmt: skip
    done = det_core("runs", "rm", run_id, "--yes")
    where = [f"deleted its checkpoints and TensorBoard files in {place}" for place in (first, second)]
    assert done.stdout.splitlines() == [f"deleted {home / 'runs' / run_id}", *where]
    assert [h.run_id for h in store.list()] == [other]
    there = {str(p.relative_to(tmp_path)) for p in [*first.rglob("*"), *second.rglob("*")] if p.is_file()}
    assert {p for p in there if run_id in p or "torn" in p or "c30" in p} == set()
    assert {f"{place.name}/tensorboard/{other}/rank-1/events" for place in (first, second)} <= there


def test_rm_of_the_folder_only_says_what_stays_by_a_command_that_shows_it(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10], storage=tmp_path / "else where")
    assert f"checkpoints in {store.root}\n" in det_core("runs", "show", run_id).stdout
    assert json.loads(det_core("runs", "show", run_id, "--json").stdout)["storage"] == store.root
    done = det_core("runs", "rm", run_id, "--yes", "--folder-only")
    assert done.stdout == f"deleted {home / 'runs' / run_id}\n"
    said, _, command = done.stderr.strip().rpartition("; to see them: det-core ")
    assert said == f"det-core: its checkpoints and TensorBoard files stay in {store.root}"
    assert f"c10-{run_id[-6:]}" in det_core(*shlex.split(command)).stdout


def test_rm_where_a_checkpoint_is_read_or_a_storage_cannot_be_opened_deletes_nothing(
    home: Path, tmp_path: Path
) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20], storage=tmp_path / "elsewhere")
    with store.read_lease(f"c20-{run_id[-6:]}", Owner.current("reader", 0)):
        done = det_core("runs", "rm", run_id, "--yes", check=1)
    assert f"run {run_id} was not deleted: a process is reading its checkpoint c20-{run_id[-6:]}" in done.stderr
    later = Journal(home / "runs" / run_id, run_id=run_id, restart=1, rank=0)
    later.record("run_start", {"storage": {"type": "nothing", "bucket": "b"}})
    later.close()
    done = det_core("runs", "rm", run_id, "--yes", check=1)
    assert f"run {run_id} could not be deleted: checkpoint_storage.type is 'nothing'" in done.stderr
    assert len(store.list()) == 2
    det_core(*shlex.split(done.stderr.strip().rpartition("det-core ")[2]), "--yes")
    assert not (home / "runs" / run_id).exists() and len(store.list()) == 2


def test_rm_refuses_a_live_run(home: Path) -> None:
    dead = one_run(home).run_id
    live = RunFolder.create(home, name="live")
    live.begin_restart()
    done = det_core("runs", "rm", dead, live.run_id, "--yes", check=1)
    assert f"{live.run_id}: still running" in done.stderr
    assert len(list((home / "runs").iterdir())) == 2
    live.release()
    det_core("runs", "rm", dead, live.run_id, "--yes")


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", 1), (b"\n", 1), (b"y\n", 0)])
def test_rm_asks_on_a_terminal(home: Path, tmp_path: Path, answer: bytes, status: int) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10], storage=tmp_path / "elsewhere")
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer)
        done = det_core("runs", "rm", "latest", stdin=theirs, check=status)
    finally:
        os.close(ours)
        os.close(theirs)
    what = f"1 run, with metrics, checkpoints and TensorBoard files, also in {store.root}"
    assert f"delete {what}? [y/N] " in done.stdout
    assert (home / "runs" / run_id).exists() == bool(status)
    assert len(store.list()) == status
