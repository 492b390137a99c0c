"""A search that runs elsewhere (wire contract, §12.8)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import Invalid, WrongState
from support.mastered import Bench, bench, train

ONE, TWO = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"


def create(request: str, lr: float) -> dict[str, Any]:
    return {"createTrial": {"requestId": request, "hyperparams": f'{{"lr": {lr}}}'}}


def train_to(request: str, length: int) -> dict[str, Any]:
    return {"trialOperation": {"validateAfter": {"requestId": request, "length": str(length)}}}


async def answer(b: Bench, number: int, event: dict[str, Any], seen: list[dict[str, Any]]) -> None:
    """What the method in this test decides: two trials, the first of which trains twice."""
    s, what = b.service, event["event"]
    seen.append(what)
    operations: list[dict[str, Any]] = []
    if "initialOperations" in what:
        operations = [create(ONE, 0.5), train_to(ONE, 1), create(TWO, 0.25), train_to(TWO, 1)]
    elif "validationCompleted" in what:
        done = what["validationCompleted"]
        again = done["requestId"] == ONE and done["validateAfterLength"] == "1"
        operations = [train_to(ONE, 3)] if again else [{"closeTrial": {"requestId": done["requestId"]}}]
    elif "trialClosed" in what and sum("trialClosed" in w for w in seen) == 2:
        operations = [{"setSearcherProgress": {"progress": 1.0}}, {"shutDown": {"cancel": False, "failure": False}}]
    for _ in range(2):  # the reply to the first one was lost
        await s.searcher_operations(number, event["id"], operations)


async def steer(b: Bench, number: int) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    while True:
        for event in await b.service.searcher_events(number, 10):
            if event["id"] == -1:
                return [*seen, event["event"]]
            await answer(b, number, event, seen)


def test_a_search_that_runs_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, train, slots=2) as b:
            number = await b.create({"name": "custom"})
            first = (await b.service.searcher_events(number, 10))[0]
            with pytest.raises(Invalid, match="no trial"):
                await b.service.searcher_operations(number, first["id"], [train_to(TWO, 1)])
            with pytest.raises(Invalid, match="none that is known"):
                await b.service.searcher_operations(number, first["id"], [{"dance": {}}])
            seen = await asyncio.wait_for(steer(b, number), 30)
            assert await b.ended(number) == "COMPLETED"
            assert "experimentInactive" in seen[-1]
            kinds = [next(iter(what)) for what in seen]
            assert kinds.count("trialCreated") == 2 and kinds.count("validationCompleted") == 3
            one, two = await b.service.trials(number)
            assert (one["request_id"], one["hparams"], one["seed"]) == (ONE, {"lr": 0.5}, 42)
            assert (one["operation_length"], two["operation_length"]) == (3, 1)

    asyncio.run(main())


def test_other_searches_take_no_operations(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, train) as b:
            number = await b.create({"name": "single", "max_length": 1})
            with pytest.raises(WrongState):
                await b.service.searcher_operations(number, None, [])
            with pytest.raises(WrongState):
                await b.service.searcher_events(number, 0)

    asyncio.run(main())
