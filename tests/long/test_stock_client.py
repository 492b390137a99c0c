"""The contract's own client, unchanged, under our master: both of its generations."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import until
from support.real_master import RealMaster, real_master
from support.recipe import FOLDER, check_course, completed, config, files, last_row, no_namespaces
from support.stock_client import RELEASES, python

SINGLE = {"name": "single", "max_length": 8}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMaster]:
    """Yield a master of four slots."""
    with real_master(tmp_path_factory.mktemp("stock") / "home", "--slots", "4") as master:
        yield master


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Return a release of the client, where it can run."""
    if reason := no_namespaces():
        pytest.skip(reason)
    python(request.param)  # installs it, if it is not there
    return str(request.param)


def stock(release: str, store: Path, searcher: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a configuration whose script runs with that release."""
    return {**config("", store, searcher, **more), "entrypoint": f"{python(release)} stock.py {release}"}


def test_it_fails_is_paused_over_a_crash_and_goes_on(real: RealMaster, release: str, tmp_path: Path) -> None:
    shared = {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "a/b"}  # at a path of its own elsewhere
    settings = stock(release, tmp_path, SINGLE, max_restarts=1, fail_at=3, wait_at=5)
    number = real.create({**settings, "checkpoint_storage": shared}, files())
    until(lambda: last_row(real, number) == (5, 2))
    real.kill()
    real.start()
    real.post(f"experiments/{number}/pause")
    until(lambda: "allocationId" not in real.trials(number)[0])
    real.post(f"experiments/{number}/activate")
    trial = completed(real, number)
    check_course(real, trial)
    assert [r["totalBatches"] for r in real.rows(trial["id"], "validation")] == [2, 4, 6, 8]
    assert real.get(f"runs/{trial['id']}/metadata") == {"metadata": {"who": {"name": "stock"}}}
    assert trial["runnerState"] == "training"
    assert any("hello: from a trial" in line["log"] for line in real.logs(trial["id"]))
    checkpoints = real.get(f"trials/{trial['id']}/checkpoints")["checkpoints"]
    assert {c["metadata"]["steps_completed"]: c["state"] for c in checkpoints}[0] == "STATE_DELETED"
    assert (tmp_path / "a" / "b" / trial["latestCheckpointUuid"] / "steps").read_text() == "8"
    assert real.rows(trial["id"], "cpu") and real.rows(trial["id"], "memory")


def test_two_trials_of_a_search_at_a_time(real: RealMaster, release: str, tmp_path: Path) -> None:
    lr = {"type": "double", "minval": 0, "maxval": 1}
    halving = {"name": "async_halving", "num_rungs": 2, "divisor": 2, "max_trials": 4, "max_concurrent_trials": 2}
    length = {"max_length": {"batches": 8}} if release < "0.38" else {"time_metric": "batches", "max_time": 8}
    searcher = {**halving, **length, **({} if release < "0.38" else {"max_length": 8})}
    number = real.create(stock(release, tmp_path, searcher, lr=lr, pace=0.1), files())
    real.until(number, "STATE_COMPLETED")
    trials = real.trials(number)
    assert [t["state"] for t in trials] == ["STATE_COMPLETED"] * 4
    assert {t["totalBatchesProcessed"] for t in trials} > {8}
    best = min(trials, key=lambda t: t["hparams"]["lr"])
    assert best["totalBatchesProcessed"] == 8
    for trial in trials:
        steps = [r["totalBatches"] for r in real.rows(trial["id"], "training")]
        assert steps == list(range(1, len(steps) + 1))


def test_invalid_hyperparameters(real: RealMaster, release: str, tmp_path: Path) -> None:
    invalid = {"type": "categorical", "vals": [True, True, False]}
    searcher = {"name": "random", "max_trials": 2, "max_length": 2, "max_concurrent_trials": 1}
    number = real.create(stock(release, tmp_path, searcher, invalid=invalid), files())
    real.until(number, "STATE_COMPLETED")
    told = [(t["hparams"]["invalid"], t["state"], t["totalBatchesProcessed"]) for t in real.trials(number)]
    assert set(told) == {(True, "STATE_COMPLETED", 0), (False, "STATE_COMPLETED", 2)}
    assert [bad for bad, *_ in told].count(False) == 2


def test_an_unmanaged_script_comes_back_and_goes_on(real: RealMaster, release: str, tmp_path: Path) -> None:
    shown = {"DET_MASTER": real.url, "DET_USER": "determined", "DET_PASS": real.token}
    folders = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(tmp_path))
    for length in ("3", "5"):
        done = subprocess.run(
            [str(python(release)), str(FOLDER / "stock_unmanaged.py"), length, f"a/b c {release}"],
            env=os.environ | shown | folders,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-300:]
    (experiment,) = [
        e for e in real.get("experiments")["experiments"] if e.get("externalExperimentId") == f"a/b c {release}"
    ]
    (trial,) = real.trials(experiment["id"])
    assert (experiment["state"], trial["state"], trial["trialRunId"]) == ("STATE_COMPLETED", "STATE_COMPLETED", 2)
    rows = real.rows(trial["id"], "training")
    assert [(r["totalBatches"], r["trialRunId"]) for r in rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    said = [line["log"] for line in real.logs(trial["id"])]
    assert [text for text in said if text.startswith("begins")] == ["begins at 0\n", "begins at 3\n"]
    kept = real.get(f"trials/{trial['id']}/checkpoints")["checkpoints"]
    assert [c["metadata"]["steps_completed"] for c in kept] == [5, 3]
