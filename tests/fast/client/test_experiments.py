"""Experiments from Python: created, waited for, steered and read back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import client
from det_core.errors import CheckpointNotFound, ExperimentInvalid, MasterError, UnknownToMaster
from det_core.storage import DirectoryStore
from support.commands import det_core
from support.processes import until
from support.running_master import TOKEN, Running
from support.stored import put

CONFIG: dict[str, Any] = {
    "name": "tried",
    "entrypoint": "true",
    "hyperparameters": {"lr": 0.1, "net": {"width": 8}},
    "searcher": {"name": "single", "metric": "loss", "max_length": 2},
    "max_restarts": 0,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a master for all tests of this file."""
    found = Running(tmp_path_factory.mktemp("master"), limit=1 << 24)
    yield found
    found.close()


@pytest.fixture
def master(running: Running, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[client.Master]:
    """Yield a session with the master."""
    monkeypatch.setenv("DET_USER_TOKEN", TOKEN)
    with client.connect(running.url) as session:
        yield session


def checkpoint(store: DirectoryStore, scratch: Path, running: Running, spec: Any, step: int) -> str:
    """Store a checkpoint and register it."""
    uuid = f"checkpoint-{step}"
    put(store, uuid, step, scratch, files={"state": b"%d" % step})
    body = {"uuid": uuid, "taskId": spec.task_id, "allocationId": spec.allocation_id, "state": "STATE_COMPLETED"}
    body |= {"resources": {"state": "1"}, "metadata": {"steps_completed": step}, "training": {}}
    running.post("checkpoints", body)
    return uuid


def test_an_experiment_is_created_waited_for_and_read(running: Running, master: client.Master, tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "train.py").write_text("pass")
    storage = {"type": "directory", "container_path": str(tmp_path / "store")}
    experiment = client.create_experiment(
        {**CONFIG, "checkpoint_storage": storage}, tmp_path / "context", overrides=["max_restarts=1"], master=master
    )
    assert (experiment.name, experiment.state, experiment.metric) == ("tried", "ACTIVE", "loss")
    assert experiment.config["max_restarts"] == 1 and experiment.smaller_is_better
    assert experiment.best_trial is None and experiment.best_metric is None
    with pytest.raises(TimeoutError, match="is still ACTIVE after 0 s"):
        experiment.wait(0)
    with pytest.raises(CheckpointNotFound):
        experiment.download_checkpoint(tmp_path / "model")
    spec = running.launched(experiment.id)[0]
    for step, loss in ((1, 0.5), (2, float("inf"))):
        running.report(spec, "training", step, {"loss": loss if step == 1 else "Infinity", "gpu": {"memory": step}})
        running.report(spec, "validation", step, {"loss": 0.5 / step})
        checkpoint(DirectoryStore(tmp_path / "store"), tmp_path, running, spec, step)
    running.complete(spec, 2, 0.25)
    running.end(spec.allocation_id)
    assert experiment.wait() == "COMPLETED" and experiment.ended and experiment.progress == 1.0
    (trial,) = experiment.trials()
    best = experiment.best_trial
    assert best is not None and (best.id, best.best_metric, best.hparams) == (trial.id, 0.25, CONFIG["hyperparameters"])
    assert best.latest_validation is not None and best.latest_validation["metrics"] == {"loss": 0.25}
    assert trial.refresh().exit_status == 0 and trial.state == "COMPLETED" and trial.steps_completed == 2
    table = trial.metrics("training")
    assert list(table.columns) == ["trial_id", "group", "steps_completed", "time", "trial_run_id", "loss", "gpu.memory"]
    assert list(table["loss"]) == [0.5, float("inf")] and list(table["gpu.memory"]) == [1, 2]
    assert len(experiment.metrics()) == 4
    assert experiment.search()["trials_closed"] == 1
    assert client.experiments(master)[0].id == experiment.id
    assert client.experiment(experiment.id, master).state == "COMPLETED"
    assert client.trial(trial.id, running.url).experiment_id == experiment.id
    found = experiment.best_checkpoint()
    assert found is not None and found["uuid"] == "checkpoint-2" and trial.latest_checkpoint == "checkpoint-2"
    assert (experiment.download_checkpoint(tmp_path / "model") / "state").read_bytes() == b"2"
    with pytest.raises(CheckpointNotFound, match="no checkpoint 'other'"):
        experiment.download_checkpoint(tmp_path / "model", "other")
    told = det_core("experiment", "download-checkpoint", experiment.id, tmp_path / "model", "--master", running.url)
    assert told.stdout.startswith(f"downloaded checkpoint checkpoint-2 to {tmp_path}/model: ")
    assert "in 2 file(s)" in told.stdout
    experiment.delete()


def test_followed_log_is_one_stream(running: Running, master: client.Master, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = client.create_experiment(CONFIG, master=master)
    spec = running.launched(experiment.id)[0]
    running.log(spec, "first")
    streams: list[str] = []
    open_stream = master.lines
    monkeypatch.setattr(
        master, "lines", lambda path, *more, **how: streams.append(path) or open_stream(path, *more, **how)
    )
    lines: list[str] = []
    trial = client.trial(spec.trial_id, master)
    thread = threading.Thread(target=lambda: lines.extend(line["log"] for line in trial.logs(follow=True)))
    thread.start()
    until(lambda: streams)
    for _ in range(20):  # nothing is printed for a while
        experiment.refresh()
    running.log(spec, "second")
    running.end(spec.allocation_id)
    thread.join()
    assert lines == ["first", "second"]
    assert streams == [f"trials/{spec.trial_id}/logs"]


def test_what_cannot_be_is_an_error_of_its_kind(master: client.Master, tmp_path: Path) -> None:
    with pytest.raises(ExperimentInvalid) as caught:
        client.create_experiment({"name": 3, "searcher": {"name": "grid"}}, master=master)
    assert len(caught.value.problems) == 3 and isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match="file not found"):
        client.create_experiment(tmp_path / "nothing.yaml", master=master)
    with pytest.raises(ValueError, match="directory not found"):
        client.create_experiment(CONFIG, tmp_path / "nothing", master=master)
    with pytest.raises(UnknownToMaster, match="experiment 9999 not found"):
        client.experiment(9999, master)
    with pytest.raises(UnknownToMaster, match="trial 9999 not found"):
        client.trial(9999, master)
    experiment = client.create_experiment(CONFIG, activate=False, master=master)
    assert experiment.state == "PAUSED"
    with pytest.raises(MasterError, match="PAUSED"):
        experiment.go_on()
    experiment.cancel()
    assert experiment.wait() == "CANCELED"
