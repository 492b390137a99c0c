"""Every search runs to its end, and what was recorded replays to what was decided."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.mastered import bench, train

SEARCHES: dict[str, dict[str, Any]] = {
    "single": {"name": "single", "max_length": 4},
    "random": {"name": "random", "max_length": 3, "max_trials": 5},
    "asha": {"name": "async_halving", "max_length": 9, "num_rungs": 3, "divisor": 3, "max_trials": 9},
    "stopping asha": {
        "name": "async_halving",
        "max_length": 9,
        "num_rungs": 3,
        "divisor": 3,
        "max_trials": 9,
        "stop_once": True,
    },
    "adaptive": {"name": "adaptive_asha", "max_length": 16, "max_trials": 8},
}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_ends_by_itself(tmp_path: Path, search: str, slots: int) -> None:
    async def main() -> None:
        async with bench(tmp_path, train, slots) as b:
            number = await b.create(SEARCHES[search])
            assert await b.ended(number) == "COMPLETED"
            await b.check_replay(number)
            found = await b.service.trials(number)
            assert {t["state"] for t in found} == {"COMPLETED"}
            assert len(found) == SEARCHES[search].get("max_trials", 1)
            assert b.engine.most == min(slots, len(found))
            best = await b.service.best_trial(number)
            assert best is not None and best["best_validation"] is not None
            lowest = min(t["best_validation"]["metric"] for t in found if t["best_validation"])
            assert best["best_validation"]["metric"] == lowest
            view = await b.service.experiment(number)
            assert view["progress"] == 1.0
            assert not b.service._hub.live.experiments and not b.service._hub.live.trials

    asyncio.run(main())
