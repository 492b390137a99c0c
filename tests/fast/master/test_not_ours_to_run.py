"""Records of scripts that the master does not start: unmanaged ones (§9), and bare runs that are synced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import det_core
from support.real_master import RealMaster
from support.recipe import FOLDER

BARE = """
import sys
from det_core import core
with core.init(name="bare", max_length=8, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    step = 0
    if ctx.latest_checkpoint is not None:
        with ctx.checkpoint.restore_path(ctx.latest_checkpoint) as path:
            step = int((path / "steps").read_text())
    while step < int(sys.argv[1]):
        step += 1
        ctx.train.report_training_metrics(step, {"loss": 1 / step})
    ctx.train.report_validation_metrics(step, {"loss": 1 / step})
    ctx.train.set_metadata({"step": step})
    with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "steps").write_text(str(step))
"""


def run(*command: str, **variables: str) -> str:
    """Return the output of a command."""
    done = subprocess.run([sys.executable, *command], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def series(real: RealMaster, trial_id: int) -> list[tuple[int, int]]:
    """Return the steps that were trained, and by which run."""
    return [(r["totalBatches"], r["trialRunId"]) for r in real.rows(trial_id, "training")]


def test_an_unmanaged_script_comes_back_and_goes_on(real: RealMaster, tmp_path: Path) -> None:
    script, store = str(FOLDER / "unmanaged.py"), str(tmp_path / "store")
    trial_id = int(run(script, real.url, real.token, "3", store, "fail"))
    trial = real.get(f"trials/{trial_id}")["trial"]
    assert (trial["state"], trial["externalTrialId"]) == ("STATE_ERROR", "T1")
    experiment = real.get(f"experiments/{trial['experimentId']}")["experiment"]
    assert (experiment["state"], experiment["unmanaged"], experiment["numTrials"]) == ("STATE_ERROR", True, 1)
    assert int(run(script, real.url, real.token, "5", store)) == trial_id
    trial = real.get(f"trials/{trial_id}")["trial"]
    assert (trial["state"], trial["trialRunId"], trial["taskId"]) == (
        "STATE_COMPLETED",
        2,
        f"{trial['experimentId']}.T1",
    )
    assert real.get(f"experiments/{trial['experimentId']}")["experiment"]["state"] == "STATE_COMPLETED"
    assert series(real, trial_id) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    kept = real.get(f"trials/{trial_id}/checkpoints")["checkpoints"]
    assert [c["metadata"]["steps_completed"] for c in kept] == [5, 3]
    assert [line["log"] for line in real.logs(trial_id)] == ["came to 3\n", "came to 5\n"]


def test_a_bare_run_is_synced_and_once_more_when_it_has_gone_on(
    real: RealMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("-c", BARE, "3")
    monkeypatch.setenv("DET_MASTER", real.url)
    monkeypatch.setenv("DET_USER_TOKEN", real.token)
    before = {e["id"] for e in real.get("experiments")["experiments"]}
    assert "experiment" in det_core("sync").stdout
    (experiment,) = [e for e in real.get("experiments")["experiments"] if e["id"] not in before]
    assert (experiment["name"], experiment["unmanaged"], experiment["state"]) == ("bare", True, "STATE_COMPLETED")
    (trial,) = real.trials(experiment["id"])
    assert series(real, trial["id"]) == [(1, 1), (2, 1), (3, 1)]
    assert "nothing new" in det_core("sync").stdout
    monkeypatch.delenv("DET_MASTER")
    run("-c", BARE, "5", DET_CORE_RESUME="latest")
    monkeypatch.setenv("DET_MASTER", real.url)
    det_core("sync", "latest")
    assert series(real, trial["id"]) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert real.get(f"runs/{trial['id']}/metadata") == {"metadata": {"step": 5}}
    kept = real.get(f"trials/{trial['id']}/checkpoints")["checkpoints"]
    assert [c["metadata"]["steps_completed"] for c in kept] == [5, 3]
    assert len(real.rows(trial["id"], "validation")) == 2
