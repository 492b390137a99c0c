"""A run on disk is brought to a master, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import client, core
from det_core.backend._sync import sync_run
from det_core.errors import MasterError, MasterUnreachable, RunError, RunNotFound
from support.foreign_master import foreign_master
from support.proxy import LOST, RESET, proxy_before
from support.running_master import TOKEN, Running

MANUAL = core.TensorboardMode.MANUAL


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "master").mkdir()
    running = Running(tmp_path / "master", 100 << 20)
    try:
        yield running
    finally:
        running.close()


def train(steps: range, **arguments: Any) -> Path:
    with core.init(tensorboard_mode=MANUAL, **arguments) as ctx:
        for step in steps:
            ctx.train.report_training_metrics(step, {"loss": 1 / step})
        ctx.train.report_validation_metrics(steps[-1], {"loss": 1 / steps[-1]})
        ctx.train.set_metadata({"steps": steps[-1]})
        with ctx.checkpoint.store_path({"steps_completed": steps[-1]}) as (path, _):
            (path / "f").write_text("f")
    return Path(client.run(ctx.run_id).path)


def series(master: Running, trial_id: int, group: str) -> list[int]:
    answer = master.ask("GET", f"trials/metrics/trial_metrics?trialIds={trial_id}&group={group}")
    return [row["totalBatches"] for part in answer.lines for row in part["metrics"]]


def checkpoints(master: Running, trial_id: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = master.ask("GET", f"trials/{trial_id}/checkpoints").json["checkpoints"]
    return sorted(found, key=lambda checkpoint: int(checkpoint["metadata"]["steps_completed"]))


def test_a_bare_run_becomes_an_unmanaged_trial(master: Running, home: Path) -> None:
    folder = train(range(1, 6), name="mine")
    sent: list[int] = []
    done = sync_run(folder, master.url, TOKEN, on_bytes=sent.append)
    experiment = master.ask("GET", f"experiments/{done.experiment_id}").json["experiment"]
    assert (experiment["name"], experiment["unmanaged"], done.state) == ("mine", True, "STATE_COMPLETED")
    assert series(master, done.trial_id, "training") == [1, 2, 3, 4, 5]
    assert master.ask("GET", f"runs/{done.trial_id}/metadata").json["metadata"] == {"steps": 5}
    (checkpoint,) = checkpoints(master, done.trial_id)
    assert checkpoint["state"] == "STATE_COMPLETED" and checkpoint["storageId"] is not None
    assert sum(sent) == sum(path.stat().st_size for path in folder.glob("journal-*.jsonl"))
    assert done.records > 6 and done.refused == ()

    again = sync_run(folder, master.url, TOKEN)
    assert again.records == 0 and series(master, done.trial_id, "validation") == [5]

    train(range(4, 9), name="mine", resume="latest")
    more = sync_run(folder, master.url, TOKEN)
    assert more.trial_id == done.trial_id
    assert series(master, done.trial_id, "training") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [c["metadata"]["steps_completed"] for c in checkpoints(master, done.trial_id)] == [5, 8]
    assert master.ask("GET", f"runs/{done.trial_id}/metadata").json["metadata"] == {"steps": 8}


def test_interrupted_anywhere_it_is_carried_on(master: Running, home: Path) -> None:
    folder = train(range(1, 4))
    with proxy_before(master.url) as proxy:
        for number in range(1, 9):
            for fault in (LOST, RESET):
                proxy.begin(lambda n, request, at=number, how=fault: how if n == at else None)  # type: ignore[misc]
                try:
                    sync_run(folder, proxy.url, TOKEN, timeout=0)
                except MasterUnreachable:
                    continue
        done = sync_run(folder, proxy.url, TOKEN)
    assert series(master, done.trial_id, "training") == [1, 2, 3]
    assert len(checkpoints(master, done.trial_id)) == 1
    assert len(master.ask("GET", "experiments").json["experiments"]) == 1


def test_a_record_that_the_master_refuses_is_named_and_keeps_no_other(master: Running, home: Path) -> None:
    folder = train(range(1, 4))
    (journal,) = folder.glob("journal-*.jsonl")
    journal.write_text(journal.read_text().replace('"resources":{', '"resources":["f"],"others":{'))
    done = sync_run(folder, master.url, TOKEN)
    (line,) = done.refused
    assert "a record of kind checkpoint: checkpoint" in line and "resources must be objects" in line
    assert series(master, done.trial_id, "training") == [1, 2, 3] and checkpoints(master, done.trial_id) == []


def test_a_determined_master_is_refused(home: Path) -> None:
    folder = train(range(1, 4))
    with foreign_master("0.38.1") as other:
        with pytest.raises(MasterError, match="not a det_core master"):
            sync_run(folder, other.url, "users")
        assert other.experiments == {}


def test_run_in_progress_is_refused(home: Path) -> None:
    with core.init(tensorboard_mode=MANUAL) as ctx:
        ctx.train.report_training_metrics(1, {"loss": 1})
        with pytest.raises(RunError, match="it is running; sync it after its end"):
            sync_run(Path(client.run(ctx.run_id).path), "http://127.0.0.1:1", "users")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no reports of a run"):
        sync_run(tmp_path, "http://127.0.0.1:1", "users")
