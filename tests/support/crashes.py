"""A search whose master dies at its N-th commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from det_core.master.service import _steering
from support.mastered import Bench, bench, train

ASHA = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 3}


async def search(b: Bench) -> int:
    """Run a short search, paused and activated on its way."""
    number = await b.do(lambda s: b.create(ASHA))
    await b.until(lambda: b.engine.launched or b.dying.dead.is_set())
    await b.do(lambda s: _steering.pause(s, number))
    await b.do(lambda s: _steering.activate(s, number))
    assert await b.ended(number) == "COMPLETED"
    await b.check_replay(number)
    return number


async def undisturbed(folder: Path, slots: int) -> tuple[dict[str, Any], int]:
    """Return the record of a run without deaths, and the number of its writes."""
    folder.mkdir()
    async with bench(folder, train, slots) as b:
        number = await search(b)
        return await b.record(number), b.dying.writes


async def disturbed(folder: Path, slots: int, at: int, *, after: bool) -> tuple[int, dict[str, Any]]:
    """Return the number of deaths, and the record of a run whose master dies at its N-th write, if it reaches that."""
    folder.mkdir()
    b = Bench(folder, train, slots)
    try:
        await b.start(at=at, after=after)
        await b.revive()
        number = await search(b)
        return b.deaths, await b.record(number)
    finally:
        await b.close()


async def die_at(folder: Path, slots: int, points: range) -> None:
    calm, writes = await undisturbed(folder / "calm", slots)
    for at in [p for p in points if p <= writes]:
        for after in (False, True):
            deaths, found = await disturbed(folder / f"{at}-{after}", slots, at, after=after)
            assert deaths == 1 or at > writes // 2, f"it did not die at write {at}"
            if slots == 1:
                assert found == calm, f"dead at write {at}, after={after}"
