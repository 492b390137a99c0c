"""Each way in which an allocation ends, and what its trial does next (wire contract, §13.3 to §13.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from support.mastered import Bench, bench, config_of, train
from support.scripted_trials import Trial

SINGLE = {"name": "single", "max_length": 4}
ASHA = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 2}


def with_bench(
    folder: Path,
    script: Callable[[Trial], Awaitable[int | None]],
    check: Callable[[Bench], Awaitable[None]],
    **more: Any,
) -> None:
    async def main() -> None:
        async with bench(folder, script, **more) as b:
            await check(b)

    asyncio.run(main())


async def only(b: Bench, number: int) -> dict[str, Any]:
    (view,) = await b.service.trials(number)
    return dict(view)


def test_exit_0_without_ack_completes_the_trial(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        return 0

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE)
        assert await b.ended(number) == "COMPLETED"
        assert (await only(b, number))["state"] == "COMPLETED"
        assert len(b.engine.launched) == 1

    with_bench(tmp_path, script, check)


def test_failures_are_counted_up_to_max_restarts(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        return 7

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE, max_restarts=2)
        assert await b.ended(number) == "ERROR"
        trial = await only(b, number)
        assert trial["state"] == "ERROR" and trial["restarts"] == 3 and "status 7" in trial["error"]
        assert trial["restarted"] == 2, "the last failure was not followed by another start"
        assert [s.trial_run_id for s in b.engine.launched] == [1, 2, 3]

    with_bench(tmp_path, script, check)


def test_a_failed_run_goes_on_from_its_latest_checkpoint(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.trial_run_id == 1:
            await trial.report("training", 1, loss=1.0)
            await trial.report("training", 2, loss=1.0)
            await trial.checkpoint(1)
            return 1
        assert trial.spec.steps_completed == 1 and trial.spec.latest_checkpoint is not None
        return await train(trial)

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE)
        assert await b.ended(number) == "COMPLETED"
        await b.check_replay(number)
        assert (await only(b, number))["restarts"] == 1

    with_bench(tmp_path, script, check)


def test_ack_of_a_pause_is_no_failure_whatever_the_status(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.trial_run_id > 1:
            return await train(trial)
        assert await trial.should_preempt(60)
        await trial.checkpoint(1)
        await trial.acknowledge()
        return 9

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE)
        await b.until(lambda: b.engine.running)
        await b.service.pause(number)
        await b.until(lambda: not b.service._hub.live.allocations)
        trial = await only(b, number)
        assert trial["state"] == "PAUSED" and trial["restarts"] == 0
        assert b.engine.graces == {b.engine.launched[0].allocation_id: 3600.0}
        await b.service.activate(number)
        assert await b.ended(number) == "COMPLETED"
        assert b.engine.launched[1].steps_completed == 1

    with_bench(tmp_path, script, check)


def test_ack_without_reason_is_counted_as_a_restart(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        await trial.acknowledge()
        return 0

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE, max_restarts=1)
        assert await b.ended(number) == "ERROR"
        assert len(b.engine.launched) == 2

    with_bench(tmp_path, script, check)


def test_a_parked_trial_is_allocated_again_when_it_is_promoted(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        while (length := await trial.operation()) is not None:
            await trial.checkpoint(length)
            await trial.complete(length, float(trial.spec.trial_id))
        await trial.acknowledge()
        return 0

    async def check(b: Bench) -> None:
        number = await b.create(ASHA)
        assert await b.ended(number) == "COMPLETED"
        runs = [(s.trial_id, s.trial_run_id, s.steps_completed) for s in b.engine.launched]
        assert runs == [(1, 1, 0), (2, 1, 0), (1, 2, 2)]
        await b.check_replay(number)

    with_bench(tmp_path, script, check)


def test_a_pause_that_is_ignored_ends_in_a_kill(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.trial_run_id > 1:
            return await train(trial)
        await asyncio.sleep(60)
        return 0

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE, preemption_timeout=0)
        await b.until(lambda: b.engine.running)
        await b.service.pause(number)
        await b.until(lambda: not b.service._hub.live.allocations)
        trial = await only(b, number)
        assert trial["state"] == "PAUSED" and trial["restarts"] == 0
        await b.service.activate(number)
        assert await b.ended(number) == "COMPLETED"

    with_bench(tmp_path, script, check)


def test_cancel_lets_trials_save_and_kill_does_not(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        assert await trial.should_preempt(60)
        await trial.checkpoint(3)
        await trial.acknowledge()
        return 0

    async def check(b: Bench) -> None:
        kept = {"save_trial_latest": 1}
        canceled, killed = await b.create(SINGLE, checkpoint_storage=kept), await b.create(SINGLE)
        await b.until(lambda: len(b.engine.running) == 2)
        await b.service.cancel(canceled)
        await b.service.cancel(canceled)
        await b.service.kill(killed)
        assert await b.ended(canceled) == "CANCELED" and await b.ended(killed) == "CANCELED"
        assert (await only(b, canceled))["latest_checkpoint"] is not None
        assert (await only(b, killed))["latest_checkpoint"] is None
        await b.service.kill(killed)  # ended is ended

    with_bench(tmp_path, script, check, slots=2)


def test_invalid_hp_is_replaced_by_the_search(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.trial_id in (1, 4):  # the first of each experiment
            await trial.early_exit()
            return 0
        return await train(trial)

    async def check(b: Bench) -> None:
        for searcher in ({"name": "random", "max_length": 2, "max_trials": 2}, ASHA):
            number = await b.create(searcher)
            assert await b.ended(number) == "COMPLETED"
            found = await b.service.trials(number)
            assert [t["operation_completed"] for t in found] == [False, True, True]
            await b.check_replay(number)

    with_bench(tmp_path, script, check)


def test_one_that_gave_up_and_lives_on_is_killed(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        await trial.early_exit()
        await asyncio.sleep(60)
        return 0

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE)
        await b.ended(number)
        assert (await only(b, number))["state"] == "CANCELED"

    with_bench(tmp_path, script, check, early_exit_grace=0.05)


def test_a_killed_process_is_a_failure_and_a_killed_trial_is_canceled(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.trial_run_id == 1:
            await asyncio.sleep(60)
        return await train(trial)

    async def check(b: Bench) -> None:
        number = await b.create({"name": "random", "max_length": 2, "max_trials": 2})
        await b.until(lambda: len(b.engine.running) == 2)
        first, second = b.engine.launched
        b.engine.kill_process(first.allocation_id)
        await b.service.kill_trial(second.trial_id)
        assert await b.ended(number) == "COMPLETED"
        one, two = await b.service.trials(number)
        assert (one["state"], one["restarts"]) == ("COMPLETED", 1)
        assert (two["state"], two["restarts"]) == ("CANCELED", 0)

    with_bench(tmp_path, script, check, slots=2)


def test_a_higher_priority_takes_the_slot_and_gives_it_back(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.experiment_id == 1 and trial.spec.trial_run_id == 1:
            assert await trial.should_preempt(60)
            await trial.acknowledge()
            return 0
        return await train(trial)

    async def check(b: Bench) -> None:
        low = await b.create(SINGLE)
        await b.until(lambda: b.engine.running)
        high = await b.create(SINGLE, resources={"priority": 10})
        assert await b.ended(high) == "COMPLETED"
        assert await b.ended(low) == "COMPLETED"
        assert [s.experiment_id for s in b.engine.launched] == [low, high, low]
        assert (await only(b, low))["restarts"] == 0

    with_bench(tmp_path, script, check)


def test_a_changed_priority_is_heeded_at_once(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.trial_run_id == 1 and trial.spec.experiment_id == 1:
            assert await trial.should_preempt(60)
            await trial.acknowledge()
            return 0
        return await train(trial)

    async def check(b: Bench) -> None:
        first, second = await b.create(SINGLE), await b.create(SINGLE)
        await b.until(lambda: b.engine.running)
        assert len(b.engine.launched) == 1
        await b.service.set_priority(second, 1)
        assert await b.ended(second) == "COMPLETED" and await b.ended(first) == "COMPLETED"
        assert [s.experiment_id for s in b.engine.launched] == [first, second, first]

    with_bench(tmp_path, script, check)


@pytest.mark.parametrize("early", [False, True])
def test_promoted_while_it_exits_is_no_failure(tmp_path: Path, early: bool) -> None:
    """One that has nothing left to do says so and exits; the other one's end promotes it meanwhile, or just before."""
    done: dict[int, asyncio.Event] = {}

    async def script(trial: Trial) -> int:
        for number in (1, 2):
            done.setdefault(number, asyncio.Event())
        if trial.spec.trial_run_id > 1:
            return await train(trial)
        length = await trial.operation()
        assert length is not None
        if trial.spec.trial_id == 2:
            await done[1].wait()
        await trial.complete(length, float(trial.spec.trial_id))
        assert await trial.operation() is None
        if not early:
            await trial.acknowledge()
        done[trial.spec.trial_id].set()
        await done[2].wait()
        await trial.acknowledge()
        return 0

    async def check(b: Bench) -> None:
        number = await b.create(ASHA, max_restarts=0)
        assert await b.ended(number) == "COMPLETED"
        assert [(t["state"], t["restarts"]) for t in await b.service.trials(number)] == [("COMPLETED", 0)] * 2
        assert [(s.trial_id, s.trial_run_id) for s in b.engine.launched] == [(1, 1), (2, 1), (1, 2)]

    with_bench(tmp_path, script, check, slots=2)


@pytest.mark.parametrize("masters", [1, 9])
def test_one_that_is_lost_again_and_again_ends(tmp_path: Path, masters: int) -> None:
    async def script(trial: Trial) -> int:
        await asyncio.sleep(60)
        return 0

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE, max_restarts=1)
        for run in range(1, 8):
            await b.until(lambda run=run: len(b.engine.launched) == run and b.engine.running)  # type: ignore[misc]
            assert (await only(b, number))["restarts"] == (run == 7)
            b.engine.lose(b.engine.running[0])
            if masters > 1:
                b.dying.dead.set()
                await b.revive()
        assert await b.ended(number) == "ERROR"
        assert (await only(b, number))["restarts"] == 2
        assert len(b.engine.launched) == 7

    with_bench(tmp_path, script, check)


def test_masters_that_die_before_they_have_launched_a_trial_are_not_its_fault(tmp_path: Path) -> None:
    async def check(b: Bench) -> None:
        number = (await b.service.create_experiment(config_of(SINGLE, max_restarts=0), activate=False))["experiment"][
            "id"
        ]
        await b.die()
        await b.start(at=1, after=True)
        task = asyncio.create_task(b.service.activate(number))
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
        assert (await only(b, number))["restarts"] == 0

    with_bench(tmp_path, train, check)


def test_one_that_gets_further_may_be_lost_as_often_as_it_is(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        run = trial.spec.trial_run_id
        if run < 12:
            if run % 3 == 0:
                await trial.checkpoint(run)
            trial.engine.lose(trial.spec.allocation_id)
            await asyncio.sleep(60)
        return await train(trial)

    async def check(b: Bench) -> None:
        number = await b.create({**SINGLE, "max_length": 20}, max_restarts=0)
        assert await b.ended(number) == "COMPLETED"
        assert [s.steps_completed for s in b.engine.launched] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]

    with_bench(tmp_path, script, check)


def test_what_kills_a_trial_that_is_done_changes_nothing(tmp_path: Path) -> None:
    """Killed on its way out, when its search wants no more of it: complete. Killed when canceled: canceled."""

    async def script(trial: Trial) -> int:
        length = await trial.operation()
        assert length is not None
        if trial.spec.trial_id == 1:
            await trial.complete(length, 1.0)
        await asyncio.sleep(60)
        return 1

    async def check(b: Bench) -> None:
        number = await b.create(SINGLE, max_restarts=0)
        await b.until(lambda: any(a.preempt_time for a in b.service._hub.live.allocations.values()))
        b.engine.kill_process(b.engine.running[0])
        assert await b.ended(number) == "COMPLETED"
        done = await only(b, number)
        assert (done["state"], done["error"]) == ("COMPLETED", None)
        canceled = await b.create(SINGLE, max_restarts=0)
        await b.until(lambda: b.engine.running)
        await b.service.cancel(canceled)
        b.engine.kill_process(b.engine.running[0])
        assert await b.ended(canceled) == "CANCELED"

    with_bench(tmp_path, script, check)
