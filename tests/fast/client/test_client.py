"""Reading runs from Python."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from det_core import client
from det_core.errors import RunLocked, RunNotFound
from det_core.journal import Journal, RunFolder
from support.journals import one_run


def rich_run(home: Path) -> client.Run:
    """Write a run of two restarts with nested metrics, one called like a column, batch metrics, and checkpoints."""
    folder = RunFolder.create(home, name="rich")
    for restart in range(2):
        folder.begin_restart({"argv": ["python", "train.py", "--lr", "0.1 0.2"]})
        journal = Journal(folder.path, run_id=folder.run_id, restart=restart, rank=0)
        for step in range(1 + 2 * restart, 4 + 2 * restart):
            metrics = {"loss": 1 / step, "acc": {"top1": step, "top5": math.nan}, "time": step * 10}
            journal.metrics("training", step, metrics, [{"x": step}, {"x": math.inf}])
        journal.metrics("validation", step, {"acc": 0.5, "name": "best"})
        journal.record("status", {"status": "fit"})
        journal.record("progress", {"fraction": 0.5})
        journal.record("metadata", {"metadata": {"note": "x"}})
        for name in ("kept", "gone", "part"):
            journal.record("checkpoint", {"storage_id": f"{name}-{restart}", "metadata": {"steps_completed": step}})
        journal.record("checkpoint_deleted", {"storage_id": f"gone-{restart}", "resources": {}})
        journal.record("checkpoint_deleted", {"storage_id": f"part-{restart}", "resources": {"a": 1}})
        journal.record("run_end", {"outcome": "preempted" if not restart else "completed"})
        journal.close()
        folder.release()
    return client.run(folder.run_id, home)


def test_a_run_says_what_it_is(home: Path) -> None:
    run = rich_run(home)
    assert (run.name, run.state, run.restarts, run.status, run.progress) == ("rich", "completed", 1, "fit", 0.5)
    assert run.metadata == {"note": "x"}
    assert run.path == home / "runs" / run.run_id
    assert run.argv == ["python", "train.py", "--lr", "0.1 0.2"]
    assert run.groups() == ["training", "validation"]
    assert [c["storage_id"] for c in run.checkpoints()] == ["kept-0", "part-0", "kept-1", "part-1"]
    assert run.checkpoints()[0]["metadata"] == {"steps_completed": 3}
    assert run.run_id in repr(run)


def test_metrics_are_a_data_frame(home: Path) -> None:
    import pandas

    frame = rich_run(home).metrics("training")
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == [
        "group",
        "steps_completed",
        "time",
        "restart",
        "rank",
        "loss",
        "acc.top1",
        "acc.top5",
        "metrics.time",
    ]
    assert list(frame["steps_completed"]) == [1, 2, 3, 4, 5]
    assert list(frame["restart"]) == [0, 0, 1, 1, 1]
    assert list(frame["metrics.time"]) == [10, 20, 30, 40, 50]
    assert frame["acc.top5"].isna().all()
    both = rich_run(home).metrics()
    assert set(both["group"]) == {"training", "validation"}


def test_superseded_rows_and_batches_are_there_for_who_asks(home: Path) -> None:
    run = rich_run(home)
    everything = run.metrics("training", superseded=True)
    assert list(everything["steps_completed"]) == [1, 2, 3, 3, 4, 5]
    assert list(everything["superseded"]) == [False, False, True, False, False, False]
    batches = run.metrics("training", batches=True)
    assert len(batches) == 15
    assert list(batches["batch"][:3].fillna(-1)) == [-1, 0, 1]
    assert list(batches["x"][1:3]) == [1, math.inf]


def test_without_pandas_metrics_are_dicts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rich_run(home)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pandas" else real(name, *a))
    rows = run.metrics("validation")
    assert [{k: row[k] for k in ("group", "steps_completed", "acc", "name")} for row in rows] == [
        {"group": "validation", "steps_completed": step, "acc": 0.5, "name": "best"} for step in (3, 5)
    ]


def test_runs_are_listed_newest_first(home: Path) -> None:
    ids = [one_run(home, name=name).run_id for name in "abc"]
    assert [run.run_id for run in client.runs()] == ids[::-1]
    assert [run.run_id for run in client.runs(home)] == ids[::-1]
    assert client.runs(home / "elsewhere") == []
    assert client.run("latest").run_id == ids[-1]


def test_a_run_is_found_by_the_beginning_of_its_id(home: Path) -> None:
    with pytest.raises(RunNotFound, match="no runs in"):
        client.run("latest")
    one, two = one_run(home).run_id, one_run(home).run_id
    assert client.run(one[:-1] if not two.startswith(one[:-1]) else one).run_id == one
    assert client.run(two).run_id == two
    for wrong in ("nope", "", "../x"):
        with pytest.raises(RunNotFound, match="no run"):
            client.run(wrong)
    with pytest.raises(RunNotFound, match=f"2 runs in .* begin with '2': .*{one}.*give more of the ID"):
        client.run("2")


def test_a_run_in_progress_is_read_anew_after_refresh(home: Path) -> None:
    folder = RunFolder.create(home, name="x")
    folder.begin_restart()
    journal = Journal(folder.path, run_id=folder.run_id, restart=0, rank=0)
    journal.metrics("training", 1, {"a": 1})
    run = client.run("latest")
    assert (run.state, len(run.metrics())) == ("running", 1)
    journal.metrics("training", 2, {"a": 1})
    assert len(run.metrics()) == 1
    assert len(run.refresh().metrics()) == 2
    with pytest.raises(RunLocked, match="is being written by pid"):
        client.delete_run(run.run_id)
    assert len(run.refresh().metrics()) == 2
    journal.close()
    folder.release()
    assert client.delete_run("latest") == folder.path
    assert not folder.path.exists()
