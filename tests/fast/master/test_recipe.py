"""The contract followed with nothing but requests (§3.4): scripts of both generations run to their end."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest

from support.processes import until
from support.real_master import RealMaster
from support.recipe import FIXED, OURS, check_course, completed, config, files, last_row, no_namespaces

SINGLE = {"name": "single", "max_length": 8}


@pytest.fixture(params=[FIXED, OURS], ids=["fixed-path", "by-variable"])
def where(request: pytest.FixtureRequest) -> str:
    """Return the place where scripts look for their files."""
    if request.param == FIXED and (reason := no_namespaces()):
        pytest.skip(reason)
    return str(request.param)


def test_both_generations_at_a_time_fail_are_paused_and_go_on(real: RealMaster, where: str, tmp_path: Path) -> None:
    release = "0.36" if where == FIXED else "0.37"
    numbers = [
        real.create(config(script, tmp_path, SINGLE, max_restarts=1, fail_at=3, wait_at=5), files())
        for script in (f"older.py {where} {release}", f"newer.py {where}")
    ]
    for number in numbers:
        until(lambda number=number: last_row(real, number) == (5, 2))
        assert real.post(f"experiments/{number}/pause") == {}
        assert real.until(number, "STATE_PAUSED")["numTrials"] == 1
    until(lambda: "allocationId" not in real.trials(numbers[0])[0])  # the other is activated while it still stops
    for number in numbers:
        assert real.post(f"experiments/{number}/activate") == {}
    older, newer = (completed(real, number) for number in numbers)
    for trial in (older, newer):
        check_course(real, trial)
    _check_told(real, older)
    assert any("hello: from a trial" in line["log"] for line in real.logs(newer["id"]))
    last = {older["latestCheckpointUuid"], newer["latestCheckpointUuid"]}
    until(lambda: {path.name for path in tmp_path.glob("[!.]*")} == last)  # of each trial that is kept


def _check_told(real: RealMaster, trial: dict[str, Any]) -> None:
    """Check the reports of a client of the older generation."""
    assert trial["runnerState"] == "training"
    metadata = real.get(f"runs/{trial['id']}/metadata")["metadata"]
    assert metadata == {"who": {"name": "older"}, "list": [1, 2.5, None, True]}
    (row,) = real.rows(trial["id"], "cpu")
    assert (row["metrics"]["avgMetrics"], row["endTime"][:19]) == (
        {"agent": {"cpu_util_simple": 50.0}},
        "2024-01-01T00:00:00",
    )
    first = real.rows(trial["id"], "training")[0]
    assert first["metrics"]["batchMetrics"] == [{"loss": 1.0}, {"loss": "Infinity"}]
    validations = real.rows(trial["id"], "validation")
    assert [r["totalBatches"] for r in validations] == [0, 8]
    assert validations[1]["metrics"]["avgMetrics"]["odd"] == "NaN"
    best = real.get(f"experiments/{trial['experimentId']}/searcher/best_searcher_validation_metric")
    assert best == {"metric": 0.5 + 1 / 9}
    states = {
        c["metadata"]["steps_completed"]: c["state"]
        for c in real.get(f"trials/{trial['id']}/checkpoints")["checkpoints"]
    }
    assert set(states) == {0, 2, 4, 5, 6, 8}
    assert (states[0], states[8]) == ("STATE_DELETED", "STATE_COMPLETED")


def test_an_older_client_in_a_search_that_promotes(real: RealMaster, tmp_path: Path) -> None:
    searcher = {"name": "async_halving", "num_rungs": 2, "divisor": 4, "max_trials": 4, "max_concurrent_trials": 1}
    lr = {"type": "double", "minval": 0, "maxval": 1}
    settings = config(f"older.py {OURS} 0.37", tmp_path, {**searcher, "max_length": {"batches": 8}}, lr=lr)
    number = real.create(settings, files())
    ended = real.until(number, "STATE_COMPLETED")
    trials = real.trials(number)
    assert [t["state"] for t in trials] == ["STATE_COMPLETED"] * 4
    best = min(trials, key=lambda t: t["hparams"]["lr"])
    assert [t["totalBatchesProcessed"] for t in trials] == [8 if t is best else 2 for t in trials]
    assert [t["operationLength"] for t in trials] == ["8" if t is best else "2" for t in trials]
    assert best is not trials[-1], "it was parked, and promoted later: choose another seed"
    assert [t["trialRunId"] for t in trials] == [2 if t is best else 1 for t in trials]
    assert (ended["bestTrialId"], ended["progress"]) == (best["id"], 1.0)


def test_a_newer_client_in_a_search_that_stops(real: RealMaster, tmp_path: Path) -> None:
    searcher = {"name": "async_halving", "num_rungs": 2, "divisor": 4, "max_trials": 4, "max_concurrent_trials": 1}
    times = {"time_metric": "batches", "max_time": 8}
    lr = {"type": "double", "minval": 0, "maxval": 1}
    settings = config(f"newer.py {OURS}", tmp_path, {**searcher, **times}, lr=lr, pace=0.15)
    number = real.create(settings, files())
    real.until(number, "STATE_COMPLETED")
    trials = real.trials(number)
    assert [t["state"] for t in trials] == ["STATE_COMPLETED"] * 4
    rung: list[float] = []
    for trial in trials:  # §12.6: the better quarter of those so far goes on, and at least the best
        loss = trial["hparams"]["lr"] + 1 / 3
        index = bisect_left(rung, loss)
        rung.insert(index, loss)
        goes_on = index < max(len(rung) // 4, 1)
        assert (trial["totalBatchesProcessed"] == 8) == goes_on, (trial["hparams"], trial["totalBatchesProcessed"])
    assert len({t["totalBatchesProcessed"] == 8 for t in trials}) == 2


def test_a_client_finds_a_shared_storage(real: RealMaster, tmp_path: Path) -> None:
    shared = {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "a/b", "save_trial_best": 0}
    settings = {
        **config(f"newer.py {OURS}", tmp_path, {"name": "single", "max_length": 4}),
        "checkpoint_storage": shared,
    }
    trial = completed(real, real.create(settings, files()))
    last = trial["latestCheckpointUuid"]
    until(lambda: [path.name for path in (tmp_path / "a" / "b").glob("[!.]*")] == [last])  # the other is deleted


def test_a_newer_client_whose_hyperparameters_are_invalid_is_replaced(real: RealMaster, tmp_path: Path) -> None:
    searcher = {"name": "random", "max_trials": 1, "max_length": 2}
    invalid = {"type": "categorical", "vals": [True, True, False]}
    number = real.create(config(f"newer.py {OURS}", tmp_path, searcher, invalid=invalid), files())
    real.until(number, "STATE_COMPLETED")
    trials = real.trials(number)
    assert {t["state"] for t in trials} == {"STATE_COMPLETED"}
    assert [t["totalBatchesProcessed"] for t in trials] == [0 if t["hparams"]["invalid"] else 2 for t in trials]
    assert sum(not t["hparams"]["invalid"] for t in trials) == 1 < len(trials)


def test_what_a_container_says_before_and_beside_its_script(real: RealMaster, tmp_path: Path) -> None:
    number = real.create(config(f"boot.py {OURS}", tmp_path, SINGLE), files())
    trial = completed(real, number)
    assert (trial["trialRunId"], trial["restarts"]) == (2, 0), "its machine was wanted back once"
    shipped = [line for line in real.logs(trial["id"]) if line["log"].startswith("shipped")]
    assert [line["log"] for line in shipped] == ["shipped by run 1\n", "shipped by run 2\n"]
    told = {key: shipped[0][key] for key in ("rankId", "level", "stdtype", "timestamp")}
    assert told["timestamp"].startswith("2024-01-01T00:00:00.25")
    assert (told["rankId"], told["level"], told["stdtype"]) == (3, "LOG_LEVEL_WARNING", "stderr")
