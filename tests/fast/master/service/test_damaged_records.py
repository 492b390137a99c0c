"""Records whose content is wrong: each is passed over, and neither the trial's end nor the master waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import StoreError
from det_core.master.service import _queries, _runner
from support.damaged_records import BY_LENGTH, check_alive, damaged, flip_bits, leave, records, running, ship
from support.mastered import bench, checkpoints_of, deaf

BY_TIME = {"name": "async_halving", "num_rungs": 2, "max_trials": 4, "time_metric": "t", "max_time": 16}


@pytest.mark.parametrize("door", ["shipped", "left behind"])
async def test_record_with_a_key_missing_or_of_another_type_is_passed_over(tmp_path: Path, door: str) -> None:
    async with bench(tmp_path, deaf) as b:
        for record in records():
            for changed in damaged(record):
                trial = await running(b, BY_TIME if record["kind"] == "metrics" else BY_LENGTH)
                if door == "shipped":
                    await ship(b.service, trial, [changed])
                else:
                    await leave(b, trial, [changed])
        await check_alive(b)


@pytest.mark.parametrize("door", ["shipped", "left behind"])
def test_flipped_bits_of_a_journal_keep_nothing_from_ending(tmp_path: Path, door: str) -> None:
    flip_bits(tmp_path, door, 100)


async def test_record_passed_over_is_in_the_log_of_its_trial_and_the_others_count(tmp_path: Path) -> None:
    async with bench(tmp_path, deaf) as b:
        trial = await running(b, BY_LENGTH)
        good = records()
        bad = {**good[1], "group": "trai.ing", "seq": 99}
        await leave(b, trial, [good[0], bad, {"damaged": "{half a li"}, good[2]])
        assert [
            row.metrics
            for row in await _queries.MetricsReader(b.service.store, [trial.spec.trial_id], "training").read(1000)
        ]
        log = [line.log for line in await b.log(trial.spec.trial_id)]
        assert len(log) == 2 and "trai.ing" in log[0] and "batch_metrics" in log[0], "its bytes are kept"
        assert "{half a li" in log[1]


async def test_records_are_given_again_when_the_database_fails(tmp_path: Path) -> None:
    async with bench(tmp_path, deaf) as b:
        trial = await running(b, BY_LENGTH)
        write = b.dying.write

        async def failing(work: Any) -> Any:
            raise StoreError("the disk is full")

        for kind in ("metrics", "operation", "checkpoint"):
            record = next(r for r in records() if r["kind"] == kind)
            b.dying.write = failing  # type: ignore[method-assign]
            with pytest.raises(Exception, match="disk is full"):
                await leave(b, trial, [record])
            b.dying.write = write  # type: ignore[method-assign]
            await leave(b, trial, [record])
        assert "ignoring" not in str(await b.log(trial.spec.trial_id)), "nothing was passed over"
        b.engine.kill_process(trial.spec.allocation_id)
        while not (saved := await checkpoints_of(b.service, trial.spec.experiment_id)):
            await asyncio.sleep(0.001)
        assert [c.uuid for c in saved] == ["saved"]


async def test_loop_that_fails_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runner, "RETRY_INTERVAL", 0.01)
    async with bench(tmp_path, deaf) as b:
        trial = await running(b, BY_LENGTH)
        events = b.engine.events
        calls = []

        async def failing_once() -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise ArithmeticError("a bug")
            async for event in events():
                yield event

        monkeypatch.setattr(b.engine, "events", failing_once)
        b.service.runner.watch()
        await b.until(lambda: len(calls) == 2)
        b.engine.kill_process(trial.spec.allocation_id)
        await b.until(lambda: b.engine.running)
