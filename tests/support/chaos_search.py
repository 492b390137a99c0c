"""A search that is disturbed, and the record of one that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from support import chaos_checks
from support.chaos import TRIAL, Machine, machine, trouble
from support.master_records import RecordReader
from support.mastered import bench, config_of, train

T = TypeVar("T")
SMALL = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 3}


def config(m: Machine, searcher: dict[str, Any], **more: Any) -> dict[str, Any]:
    keep = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
    given = {
        "entrypoint": "python train.py",
        "environment": {"environment_variables": [f"CHAOS_TOKENS={m.tokens}"]},
        "max_restarts": 1000,
        "checkpoint_storage": {"type": "directory", "container_path": str(m.saved), **keep},
        **more,
    }
    return config_of(searcher, **given)


def calm_course(folder: Path, searcher: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an undisturbed run of the same seed on one slot, with trials in this process."""

    async def work() -> dict[str, Any]:
        async with bench(folder, train) as b:
            number = await b.create(searcher)
            assert await b.ended(number) == "COMPLETED"
            return await chaos_checks.course(b.reader(number))

    folder.mkdir()
    return asyncio.run(work())


def disturbed(
    folder: Path,
    slots: int,
    seed: int,
    searcher: dict[str, Any],
    kinds: list[str],
    look: Callable[[Machine, RecordReader], Awaitable[T]],
    *,
    script: Path = TRIAL,
    longest: float = 0.7,
    **more: Any,
) -> tuple[Machine, T]:
    """Run an experiment with troubles, ``longest`` seconds apart at most; at its end, ``look`` at its record.

    Afterwards the master is stopped, and no process left.
    """
    with machine(folder, slots, seed, script) as m:
        number = m.create(config(m, searcher, **more))
        try:
            trouble(m, number, kinds, longest)
            assert m.ended(number) == "COMPLETED"
            found = asyncio.run(look(m, m.reader(number)))
        except BaseException:
            print(f"seed {seed}: {dict(m.moments)}\n{m.last_words()}")
            raise
        m.stop_master()
        left = m.processes() | {process for process in m.seen if process.alive}
        assert not left, f"seed {seed}: processes outlive the experiment: {left}"
        print(f"seed {seed}, {slots} slot(s): {dict(m.moments)}")
        return m, found


def check(
    calm: dict[str, Any] | None,
) -> Callable[[Machine, RecordReader], Awaitable[dict[str, list[int]]]]:
    """Return what checks that nothing is lost, doubled or damaged, and that the course is the calm one.

    It returns the steps of the checkpoints kept.
    """

    async def look(m: Machine, reader: RecordReader) -> dict[str, list[int]]:
        await chaos_checks.nothing_lost_or_doubled(reader, m.moments["trial"])
        await chaos_checks.as_scripted(reader)
        await chaos_checks.whole_logs(reader)
        assert m.are_tokens_refused()
        if calm is not None:
            assert await chaos_checks.course(reader) == calm
        return await chaos_checks.steps_kept(reader, m.saved, m.moments.total() * m.slots)

    return look
