"""Reports of trials: counted once, and recovered from the journals of dead processes.

That repeats count once and that a zombie is rejected, on every route: ``test_posted_twice.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from det_core.master._errors import Conflict, Invalid
from det_core.master.service import (
    _allocations,
    _checkpoints,
    _operations,
    _queries,
    _reports,
)
from support.mastered import Bench, bench, checkpoints_of, deaf, trials_of
from support.scripted_trials import Trial

SINGLE = {"name": "single", "max_length": 4}
BY_EPOCHS = {"name": "async_halving", "max_time": 4, "time_metric": "epoch", "num_rungs": 2, "max_trials": 3}


async def idle(trial: Trial) -> int:
    """Wait to be stopped."""
    await trial.should_preempt(60)
    await trial.acknowledge()
    return 0


async def running(b: Bench) -> Trial:
    """Return a running trial, to report for."""
    await b.create(SINGLE)
    await b.until(lambda: b.engine.running)
    return Trial(b.engine.launched[0], b.engine)


async def test_a_completed_operation_counts_once_and_another_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path, deaf) as b:
        trial = await running(b)
        number, s = trial.spec.trial_id, b.service
        with pytest.raises(Conflict, match="length 3"):
            await _operations.complete(s, number, 3, 0.5)
        with pytest.raises(Invalid, match="number"):
            await _operations.complete(s, number, 4, "good")
        await _operations.complete(s, number, 4, 0.5)
        await _operations.complete(s, number, 4, 0.5)
        with pytest.raises(Conflict, match=r"0\.5 already"):
            await _operations.complete(s, number, 4, 0.25)
        assert (await _operations.current(s, number))["completed"]
        kept = await b.record(trial.spec.experiment_id)
        assert [e["kind"] for e, _ in kept["events"]].count("completed") == 1
        assert await _allocations.poll(s, trial.spec.allocation_id, 0)  # nothing is left to do: it is asked to end


async def test_the_journal_of_a_dead_process_makes_up_for_what_never_arrived(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        trial.record("metrics", group="validation", steps_completed=4, metrics={"loss": 0.25})
        body = {"storage_id": "saved", "metadata": {"steps_completed": 4}, "resources": {"f": 1}}
        trial.record("checkpoint", body=body)
        trial.record("metadata", body={"metadata": {"note": "mine"}})
        trial.record("operation", body={"length": 4, "searcher_metric": 0.25})
        trial.record("out_of_operations", body={})
        return 137  # killed before any of it was sent

    async with bench(tmp_path, script) as b:
        number = await b.create(SINGLE)
        assert await b.ended(number) == "ERROR"  # the search has closed the trial, so that it does not run again
        (trial,) = await trials_of(b.service, number)
        assert trial.operation_completed and len(b.engine.launched) == 1
        assert trial.best_validation is not None and trial.best_validation.metric == 0.25
        assert [c.uuid for c in await checkpoints_of(b.service, number)] == ["saved"]
        assert await _reports.get_metadata(b.service, trial.id) == {"note": "mine"}
        await b.check_replay(number)


async def test_a_checkpoint_that_was_journaled_and_shipped_is_registered_at_the_latest_when_its_process_dies(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, deaf) as b:
        trial = await running(b)
        body = {"storage_id": "saved", "metadata": {"steps_completed": 3}, "resources": {"f": 7}}
        trial.record("checkpoint", body=body)
        await trial.ship()
        b.engine.kill_process(trial.spec.allocation_id)
        await b.until(lambda: len(b.engine.launched) == 2)
        assert b.engine.launched[1].latest_checkpoint == "saved"
        kept = await _checkpoints.get(b.service, "saved")
        assert (kept.state, kept.resources, kept.allocation_id) == ("COMPLETED", {"f": 7}, trial.spec.allocation_id)


async def test_a_search_by_validations_is_told_each_step_once(tmp_path: Path) -> None:
    searcher = {**BY_EPOCHS, "divisor": 2, "max_concurrent_trials": 1}

    async def script(trial: Trial) -> int:
        for epoch in range(1, 100):
            if await trial.should_preempt(0.01):
                return 0
            for _ in range(2):
                await trial.report("validation", epoch, loss=float(trial.spec.trial_id), epoch=epoch)
        return 0

    async with bench(tmp_path, script) as b:
        number = await b.create(searcher)
        assert await b.ended(number) == "COMPLETED"
        kept = await b.record(number)
        told = [(e["request_id"], e["step"]) for e, _ in kept["events"] if e["kind"] == "validated"]
        assert len(told) == len(set(told)) and told
        stops = [a["request_id"] for _, actions in kept["events"] for a in actions if a["kind"] == "stop"]
        assert len(stops) == len(set(stops)) == 3, "each trial is stopped, and once"
        assert {t["state"] for t in kept["trials"]} == {"COMPLETED"}
        await b.check_replay(number)


async def test_a_validation_without_the_metric_ends_a_search_by_validations(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        await trial.report("validation", 1, loss=1.0)
        await asyncio.sleep(60)
        return 0

    async with bench(tmp_path, script) as b:
        number = await b.create(BY_EPOCHS)
        assert await b.ended(number) == "ERROR"
        assert "'epoch'" in str((await _queries.experiment(b.service, number)).error)


async def test_how_far_a_trial_is_that_does_not_say_so(tmp_path: Path) -> None:
    async with bench(tmp_path, idle) as b:
        trial = await running(b)
        number, s = trial.spec.trial_id, b.service
        await trial.report("training", 1, loss=1.0)
        assert (await _queries.trial(s, number)).progress == 0.25
        await _operations.progress(s, number, 3)
        assert (await _queries.trial(s, number)).progress == 0.75, "what it says counts"
        await trial.report("training", 4, loss=1.0)
        await _operations.complete(s, number, 4, 1.0)
        assert await b.ended(trial.spec.experiment_id) == "COMPLETED"
        assert (await _queries.trial(s, number)).progress == 1.0
        epochs = await b.create({"name": "single", "max_length": {"epochs": 50}})
        await b.until(lambda: len(b.engine.launched) == 2 and b.engine.running)
        other = Trial(b.engine.launched[1], b.engine)
        await other.report("training", 10, loss=1.0)
        assert (await trials_of(s, epochs))[0].progress == 0.0, "its steps are not epochs"
