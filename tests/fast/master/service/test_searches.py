"""Every search runs to its end, and what was recorded replays to what was decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from det_core.master.service import _queries
from support.mastered import bench, train, trials_of

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
    "optuna": {"name": "optuna", "max_length": 3, "max_trials": 5},
    "adaptive": {"name": "adaptive_asha", "max_length": 16, "max_trials": 8},
}


@pytest.fixture
def search(request: pytest.FixtureRequest) -> str:
    """Return the name of a search whose library is imported: the replay would import it on the loop."""
    if request.param == "optuna":
        pytest.importorskip("optuna")
    return str(request.param)


@pytest.mark.parametrize(("search", "slots"), list(zip(SEARCHES, (1, 2, 1, 2, 1, 2), strict=True)), indirect=["search"])
async def test_a_search_ends_by_itself(tmp_path: Path, search: str, slots: int) -> None:
    async with bench(tmp_path, train, slots) as b:
        number = await b.create(SEARCHES[search])
        assert await b.ended(number) == "COMPLETED"
        await b.check_replay(number)
        found = await trials_of(b.service, number)
        assert {t.state for t in found} == {"COMPLETED"}
        assert len(found) == SEARCHES[search].get("max_trials", 1)
        assert b.engine.most == min(slots, len(found))
        best = await _queries.best_trial(b.service, number)
        assert best is not None and best.best_validation is not None
        lowest = min(t.best_validation.metric for t in found if t.best_validation)
        assert best.best_validation.metric == lowest
        view = await _queries.experiment(b.service, number)
        assert view.progress == 1.0
        assert not b.service.live.experiments and not b.service.live.trials


async def test_a_grid_runs_every_combination_once(tmp_path: Path) -> None:
    async with bench(tmp_path, train, 2) as b:
        axes = {"lr": {"type": "categorical", "vals": [0.1, 0.2, 0.3]}, "b": {"type": "const", "val": 1}}
        number = await b.create({"name": "grid", "max_length": 1}, hyperparameters=axes)
        assert await b.ended(number) == "COMPLETED"
        found = [t.hparams for t in await trials_of(b.service, number)]
        assert found == [{"b": 1, "lr": lr} for lr in (0.3, 0.2, 0.1)]


async def test_a_search_is_recovered_from_its_record(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        number = await b.create(SEARCHES["asha"])
        for count in (2, 5, 8):
            await b.until(lambda count=count: len(b.engine.launched) >= count)
            b.dying.dead.set()
            await b.revive()
        assert await b.ended(number) == "COMPLETED"
        await b.check_replay(number)
        state = await _queries.search(b.service, number)
        assert [len(r["entries"]) for r in state.rungs[0]["rungs"]] == [9, 3, 1]
