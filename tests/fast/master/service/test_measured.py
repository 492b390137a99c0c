"""Searches whose trials do not report what the search goes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from det_core.master.engines import LineFilter
from det_core.master.service import _queries
from support.mastered import Bench, bench, trials_of
from support.scripted_trials import Script, Trial

RANDOM = {"name": "random", "max_length": 2, "max_trials": 3}
HALVING = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 2}
NOBODY = "no validation has `loss`, the metric of the search; trials report: accuracy"


def validating(name: str, *, completes: bool) -> Script:
    """Train, and report a validation metric of that name."""

    async def script(trial: Trial) -> int:
        while (length := await trial.operation()) is not None:
            for step in (1, 2):
                await trial.report("validation", step, **{name: 0.5})
            if not completes:
                return 0
            await trial.complete(length, 0.5)
        await trial.acknowledge()
        return 0

    return script


async def lines(b: Bench, number: int) -> list[str]:
    """Return the master's warnings in the logs of the trials."""
    logs = [await b.log(t.id, choice=LineFilter("WARNING")) for t in await trials_of(b.service, number)]
    return [line.log for log in logs for line in log]


@pytest.mark.parametrize("searcher", [RANDOM, HALVING])
async def test_a_search_that_nobody_told_anything_ends_in_error(tmp_path: Path, searcher: dict[str, Any]) -> None:
    async with bench(tmp_path, validating("accuracy", completes=False)) as b:
        number = await b.create(searcher)
        assert await b.ended(number) == "ERROR"
        assert (await _queries.experiment(b.service, number)).error == NOBODY
        assert await lines(b, number) == [NOBODY + "\n"], "once, and as soon as it is known"


async def test_what_operations_are_completed_with_counts_but_says_nothing_of_the_best(tmp_path: Path) -> None:
    async with bench(tmp_path, validating("accuracy", completes=True)) as b:
        number = await b.create(HALVING)
        assert await b.ended(number) == "COMPLETED"
        view = await _queries.experiment(b.service, number)
        assert (view.remarks, view.best_trial_id, view.error) == ([NOBODY], None, None)
        assert await lines(b, number) == [NOBODY + "\n"]


async def test_equal_metrics_of_different_hyperparameters_are_remarked(tmp_path: Path) -> None:
    async with bench(tmp_path, validating("loss", completes=True)) as b:
        number = await b.create(RANDOM)
        assert await b.ended(number) == "COMPLETED"
        (remark,) = (await _queries.experiment(b.service, number)).remarks
        assert remark == "all 3 trials report the same `loss`: does the script use lr?"
        assert await lines(b, number) == []


async def test_a_search_without_any_metrics_is_nobodys_mistake(tmp_path: Path) -> None:
    async def silent(_trial: Trial) -> int:
        return 0

    async def gives_up(trial: Trial) -> int:
        await trial.early_exit()
        return 0

    async with bench(tmp_path, silent) as b:
        number = await b.create(RANDOM)
        assert await b.ended(number) == "COMPLETED"
        b.engine.script = gives_up
        number = await b.create(HALVING)
        assert await b.ended(number) == "COMPLETED", "whoever gives up has nothing to report"
