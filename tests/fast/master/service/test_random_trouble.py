"""At random moments: trials are killed, the master is killed, the experiment is paused and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import WrongState
from det_core.master.service import _steering
from support.mastered import Bench, bench, train

ASHA = {"name": "async_halving", "max_length": 9, "num_rungs": 3, "divisor": 3, "max_trials": 5}


async def trouble(b: Bench, number: int, chance: random.Random, times: int) -> None:
    """Make trouble, a few times; always leaves a master that runs, and an experiment that is active."""
    for _ in range(times):
        await asyncio.sleep(chance.random() * 0.15)
        what = chance.choice(["trial", "master", "pause", "both"])
        if what in ("trial", "both") and b.engine.running:
            b.engine.kill_process(chance.choice(b.engine.running))
        if what in ("master", "both"):
            b.dying.dead.set()
            await b.revive()
        if what == "pause":
            with contextlib.suppress(WrongState):  # it may end meanwhile
                await _steering.pause(b.service, number)
                await asyncio.sleep(chance.random() * 0.03)
                await _steering.activate(b.service, number)


def course(kept: dict[str, Any]) -> dict[str, Any]:
    """Return the record, without the trials' numbers of restarts."""
    return {**kept, "trials": [{**trial, "restarts": None} for trial in kept["trials"]]}


async def run(folder: Path, slots: int, seed: int | None, times: int = 4) -> dict[str, Any]:
    folder.mkdir()
    async with bench(folder, train, slots) as b:
        number = await b.create(ASHA, max_restarts=1000)
        if seed is not None:
            await trouble(b, number, random.Random(seed), times)
        assert await b.ended(number) == "COMPLETED"
        await b.check_replay(number)
        return course(await b.record(number))


@pytest.mark.parametrize("slots", [1, 2])
def test_some_random_moments(tmp_path: Path, slots: int) -> None:
    calm = asyncio.run(run(tmp_path / "calm", slots, None))
    for seed in (1, 2):
        found = asyncio.run(run(tmp_path / f"{seed}", slots, seed))
        if slots == 1:
            assert found == calm, f"seed {seed}"
