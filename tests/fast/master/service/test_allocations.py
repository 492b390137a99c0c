"""Allocations: asked to stop, met at barriers, adopted by the next master."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from det_core.master._errors import Fenced, NotFound
from det_core.master.service import _access, _allocations, _operations, _queries, _steering
from support.mastered import Bench, bench, deaf, train, trials_of
from support.scripted_trials import Trial

SINGLE = {"name": "single", "max_length": 2}
ASHA = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 2}


async def one(b: Bench) -> str:
    """Return the ID of an allocation that runs."""
    await b.create(SINGLE)
    await b.until(lambda: b.engine.running)
    return b.engine.running[0]


async def test_the_word_to_stop_wakes_every_poll_at_once_and_stays_said(tmp_path: Path) -> None:
    async with bench(tmp_path, deaf) as b:
        allocation = await one(b)
        assert await _allocations.poll(b.service, allocation, 0) is False
        assert await _allocations.poll(b.service, allocation, 0.01) is False
        polls = [asyncio.create_task(_allocations.poll(b.service, allocation, 60)) for _ in range(1000)]
        await asyncio.sleep(0)
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < 0.25, "polls that wait cost nothing"
        await _steering.pause(b.service, 1)
        assert await asyncio.wait_for(asyncio.gather(*polls), 5) == [True] * 1000
        assert await _allocations.poll(b.service, allocation, 0) is True


async def test_polls_of_an_allocation_that_ends_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_allocations, "UNKNOWN_PAUSE", 0.05)
    async with bench(tmp_path, deaf) as b:
        allocation = await one(b)
        poll = asyncio.create_task(_allocations.poll(b.service, allocation, 60))
        await asyncio.sleep(0.05)
        await _steering.kill(b.service, 1)
        assert await poll is True
        await b.ended(1)
        assert await _allocations.poll(b.service, allocation, 60) is False
        with pytest.raises(Fenced):
            await _allocations.rendezvous(b.service, allocation)
        before = time.monotonic()
        with pytest.raises(NotFound):
            await _allocations.poll(b.service, "1.nobody.1", 60)
        assert time.monotonic() - before >= 0.05, "whoever asks for nothing is slowed down"


async def dies(b: Bench) -> None:
    b.dying.dead.set()
    await b.revive()


async def test_the_next_master_adopts_what_runs(tmp_path: Path) -> None:
    async with bench(tmp_path, deaf) as b:
        allocation = await one(b)
        view = await _queries.trial(b.service, 1)
        assert (view.state, view.allocation_id) == ("RUNNING", allocation)
        token = b.engine.launched[0].session_token
        await dies(b)
        assert b.engine.running == [allocation] and len(b.engine.launched) == 1
        assert (await _access.identify(b.service, token) or {})["allocation_id"] == allocation
        assert (await _queries.trial(b.service, 1)).state == "RUNNING"
        assert (_queries.master(b.service))["slots_in_use"] == [0]
        await _steering.kill(b.service, 1)
        assert await b.ended(1) == "CANCELED"


async def test_a_pause_outlives_the_master_with_what_is_left_of_its_grace(tmp_path: Path) -> None:
    async with bench(tmp_path, deaf) as b:
        number = await b.create(SINGLE, preemption_timeout=50)
        await b.until(lambda: b.engine.running)
        allocation = b.engine.running[0]
        await _steering.pause(b.service, number)
        await asyncio.sleep(0.05)
        await dies(b)
        assert await _allocations.poll(b.service, allocation, 60) is True
        await b.until(lambda: b.engine.graces[allocation] < 50)
        assert 40 < b.engine.graces[allocation] < 50
        assert (await _queries.experiment(b.service, number)).state == "PAUSED"


async def test_who_gave_up_is_killed_by_the_next_master(tmp_path: Path) -> None:
    async with bench(tmp_path, deaf, early_exit_grace=0.3) as b:
        await one(b)
        await _operations.give_up(b.service, 1, "INVALID_HP")
        await dies(b)
        assert await b.ended(1) in ("CANCELED", "COMPLETED", "ERROR")
        assert (await _queries.trial(b.service, 1)).state == "CANCELED"


@pytest.mark.parametrize("alive", [True, False])
async def test_what_a_dead_master_has_told_a_trial_counts(tmp_path: Path, alive: bool) -> None:
    """Promote a trial without operations before it has acknowledged that it exits, which another master records."""
    told, promoted = asyncio.Event(), asyncio.Event()

    async def script(trial: Trial) -> int:
        if trial.spec.trial_run_id > 1:
            return await train(trial)
        length = await trial.operation()
        assert length is not None
        if trial.spec.trial_id == 2:
            await told.wait()
        await trial.complete(length, float(trial.spec.trial_id))
        assert await trial.operation() is None
        (told if trial.spec.trial_id == 1 else promoted).set()
        await promoted.wait()
        trial.record("out_of_operations", body={})
        if trial.spec.trial_id == 1 and not alive:
            return 137  # killed before its exit was recorded
        await trial.acknowledge()
        return 0

    async with bench(tmp_path, script, slots=2) as b:
        number = await b.create(ASHA, max_restarts=0)
        await told.wait()
        await dies(b)
        assert await b.ended(number) == "COMPLETED"
        assert [(t.state, t.restarts) for t in await trials_of(b.service, number)] == [("COMPLETED", 0)] * 2
        assert [(s.trial_id, s.trial_run_id) for s in b.engine.launched] == [(1, 1), (2, 1), (1, 2)]
