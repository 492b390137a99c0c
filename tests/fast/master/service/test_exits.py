"""Ends of allocations at moments that real scripts do not meet on purpose (wire contract, §13.3 to §13.5).

The tables are in ``scheduler/test_exits.py``; the rows with real scripts in ``test_jobs.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from det_core.master.engines import Cause
from det_core.master.service import _create, _steering
from det_core.protocol.records import TrialView
from support.mastered import Bench, bench, config_of, train, trials_of
from support.scripted_trials import Trial

SINGLE = {"name": "single", "max_length": 4}
ASHA = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 2}


async def only(b: Bench, number: int) -> TrialView:
    (view,) = await trials_of(b.service, number)
    return view


async def test_one_that_gave_up_and_lives_on_is_killed(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        await trial.early_exit()
        await asyncio.sleep(60)
        return 0

    async with bench(tmp_path, script, early_exit_grace=0.05) as b:
        number = await b.create(SINGLE)
        await b.ended(number)
        assert (await only(b, number)).state == "CANCELED"


@pytest.mark.parametrize("searcher, restarts, state", [(SINGLE, 0, "ERROR"), (ASHA, 1, "COMPLETED")])
async def test_one_that_fails_after_its_last_operation_has_failed(
    tmp_path: Path, searcher: dict[str, Any], restarts: int, state: str
) -> None:
    """One of a single search is in error; one that its search may promote is counted, parked, and asked for more."""

    async def script(trial: Trial) -> int:
        status = await train(trial)
        return 1 if trial.spec.trial_id == 1 and trial.spec.trial_run_id == 1 else status

    async with bench(tmp_path, script) as b:
        number = await b.create(searcher)
        await b.ended(number)
        first = (await trials_of(b.service, number))[0]
        assert (first.state, first.restarts) == (state, restarts)
        assert (first.error is None) == (state == "COMPLETED")
        assert first.operation_completed, "what it had completed counts"


async def test_one_of_invalid_hyperparameters_says_so(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        for _ in "12":  # a repeat changes nothing
            await trial.early_exit()
        return 0

    async with bench(tmp_path, script) as b:
        number = await b.create(SINGLE)
        await b.ended(number)
        view = await only(b, number)
        assert view.state == "COMPLETED" and "raised InvalidHP" in str(view.error)


@pytest.mark.parametrize("masters", [1, 9])
async def test_one_that_is_lost_again_and_again_ends(tmp_path: Path, masters: int) -> None:
    async def script(trial: Trial) -> int:
        await asyncio.sleep(60)
        return 0

    async with bench(tmp_path, script) as b:
        number = await b.create(SINGLE, max_restarts=1)
        for run in range(1, 8):
            await b.until(lambda run=run: len(b.engine.launched) == run and b.engine.running)  # type: ignore[misc]
            assert (await only(b, number)).restarts == (run == 7)
            b.engine.lose(b.engine.running[0])
            if masters > 1:
                b.dying.dead.set()
                await b.revive()
        assert await b.ended(number) == "ERROR"
        assert (await only(b, number)).restarts == 2
        assert len(b.engine.launched) == 7


async def test_masters_that_die_before_they_have_launched_a_trial_are_not_its_fault(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        created = await _create.create_experiment(b.service, config_of(SINGLE, max_restarts=0), activate=False)
        number = created.id
        await b.die()
        await b.start(at=1, after=True)
        task = asyncio.create_task(_steering.activate(b.service, number))
        for _ in range(20):
            await asyncio.wait_for(b.dying.dead.wait(), 10)
            await b.die()
            await b.start(at=1, after=True)
        task.cancel()
        await b.die()
        await b.start()
        assert await b.ended(number) == "COMPLETED"
        (spec,) = b.engine.launched
        assert spec.trial_run_id > 8
        assert (await only(b, number)).restarts == 0


async def test_time_limit_is_a_failure_unless_something_was_saved(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        run = trial.spec.trial_run_id
        if run < 4:
            await trial.checkpoint(run)
        trial.engine.lose(trial.spec.allocation_id, Cause.TIME)
        await asyncio.Event().wait()
        return 0

    async with bench(tmp_path, script) as b:
        number = await b.create({**SINGLE, "max_length": 20}, max_restarts=0)
        assert await b.ended(number) == "ERROR"
        assert [s.steps_completed for s in b.engine.launched] == [0, 1, 2, 3]
