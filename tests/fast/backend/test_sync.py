"""A run on disk is brought to a master, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core import client, core
from det_core.backend.rest import sync_run
from det_core.errors import MasterError, MasterUnreachable, ReportsNotShipped, RunNotFound
from support.foreign_master import foreign_master
from support.managed import opened
from support.proxy import LOST, RESET, proxy_before

MANUAL = core.TensorboardMode.MANUAL


def train(steps: range, **arguments: object) -> Path:
    with core.init(tensorboard_mode=MANUAL, **arguments) as ctx:  # type: ignore[arg-type]
        for step in steps:
            ctx.train.report_training_metrics(step, {"loss": 1 / step})
        ctx.train.report_validation_metrics(steps[-1], {"loss": 1 / steps[-1]})
        ctx.train.set_metadata({"steps": steps[-1]})
        with ctx.checkpoint.store_path({"steps_completed": steps[-1]}) as (path, _):
            (path / "f").write_text("f")
    return Path(client.run(ctx.run_id).path)


def test_a_bare_run_becomes_an_unmanaged_trial(home: Path) -> None:
    folder = train(range(1, 6), name="mine")
    with foreign_master("0.38.1") as master:
        told: list[tuple[int, int]] = []
        done = sync_run(folder, master.url, "users", progress=lambda now, total: told.append((now, total)))
        trial = master.trials[done.trial_id]
        assert master.experiments[folder.name]["id"] == done.experiment_id
        assert '"name": "mine"' in master.experiments[folder.name]["config"]
        assert [r["steps"] for r in trial.rows] == [1, 2, 3, 4, 5, 5]
        assert (done.state, trial.unmanaged_state) == ("STATE_COMPLETED", "STATE_COMPLETED")
        assert trial.metadata == {"steps": 5}
        (checkpoint,) = master.checkpoints.values()
        assert checkpoint["allocationId"] is None and checkpoint["taskId"] == trial.task_id
        assert master.storages[checkpoint["storageId"] - 1]["host_path"] == str(folder / "checkpoints")
        assert told[-1][0] == told[-1][1] > 0 and told == sorted(told)
        assert done.records > 6 and done.refused == ()

        again = sync_run(folder, master.url, "users")
        assert again.records == 0 and len(trial.rows) == 6 and len(master.checkpoints) == 1 and trial.run_id == 1

        train(range(4, 9), name="mine", resume="latest")
        more = sync_run(folder, master.url, "users")
        assert more.trial_id == done.trial_id and trial.run_id == 2
        series = [r for r in trial.rows if r["group"] == "training" and not r["hidden"]]
        assert [r["steps"] for r in series] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert [c["metadata"]["steps_completed"] for c in master.checkpoints.values()] == [5, 8]


def test_interrupted_anywhere_it_is_carried_on(home: Path) -> None:
    folder = train(range(1, 4))
    with foreign_master("0.37.0") as master, proxy_before(master.url) as proxy:
        for number in range(1, 14):
            for fault in (LOST, RESET):
                proxy.begin(lambda n, request, at=number, how=fault: how if n == at else None)  # type: ignore[misc]
                try:
                    sync_run(folder, proxy.url, "users", patience=0)
                except MasterUnreachable:
                    continue
        done = sync_run(folder, proxy.url, "users")
        trial = master.trials[done.trial_id]
        assert [r["steps"] for r in trial.rows if not r["hidden"]] == [1, 2, 3, 3]
        assert len(master.checkpoints) == 1 and len(master.experiments) == 1 and len(master.trials) == 1


def test_what_a_trial_could_not_bring_is_brought_later(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with foreign_master("0.38.1") as master, proxy_before(master.url) as proxy:
        trial = master.add_trial()
        env = {"DET_CORE_SHIP_TIMEOUT": "0.3", "DET_CORE_RUN_DIR": str(tmp_path / "run")}
        with pytest.raises(ReportsNotShipped):
            with opened(master, trial, tmp_path, monkeypatch, url=proxy.url, env=env) as ctx:
                ctx.train.report_training_metrics(1, {"loss": 1})
                ctx.train.get_metadata()
                proxy.begin(lambda number, request: RESET)
                ctx.train.report_training_metrics(2, {"loss": 2})
        assert [r["steps"] for r in trial.rows] == [1]
        with foreign_master("0.38.1") as other:
            other.cluster_id = "another"
            with pytest.raises(MasterError, match=r"belong to trial 1 of the master at .*, cluster the-cluster"):
                sync_run(tmp_path / "run", other.url, "users")
        done = sync_run(tmp_path / "run", master.url, "users")
        assert (done.trial_id, done.state, done.refused) == (trial.trial_id, "", ())
        assert [r["steps"] for r in trial.rows] == [1, 2]
        assert sync_run(tmp_path / "run", master.url, "users").records == 0


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no reports of a run"):
        sync_run(tmp_path, "http://127.0.0.1:1", "users")
