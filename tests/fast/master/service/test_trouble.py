"""The store fails: what was not kept has not happened, and what was asked meanwhile is tried alone or again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from det_core.errors import StoreError
from det_core.master._errors import MasterError, NotFound
from det_core.master.service import (
    _actor,
    _create,
    _queries,
    _retention,
    _steering,
)
from support.mastered import bench, experiments_of, train
from support.scripted_trials import Trial

SINGLE = {"name": "single", "max_length": 2}


class Refusing:
    """Refuses the next writes of a store."""

    def __init__(self, store: Any, times: int) -> None:
        self._write, self.left = store.write, times
        store.write = self

    async def __call__(self, work: Callable[[Session], Any]) -> Any:
        if self.left > 0:
            self.left -= 1
            raise StoreError("the disk is full")
        return await self._write(work)


async def test_what_was_not_kept_has_not_happened(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        number = (await _create.create_experiment(b.service, b_config(), activate=False)).id
        Refusing(b.dying, 1)
        with pytest.raises(StoreError, match="disk is full"):  # answered 503: clients ask again
            await _steering.activate(b.service, number)
        assert (await _queries.experiment(b.service, number)).state == "PAUSED"
        await asyncio.sleep(0.05)
        assert not b.engine.launched, "nothing was done that was not kept"
        await _steering.activate(b.service, number)
        assert await b.ended(number) == "COMPLETED"
        await b.check_replay(number)


def b_config() -> dict[str, Any]:
    from support.mastered import config_of

    return config_of(SINGLE)


async def test_one_bad_request_harms_no_other_of_its_transaction(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        actor = b.service.actor

        def breaks(session: Session) -> None:
            raise ArithmeticError("a broken write")

        bad = asyncio.create_task(actor.do(lambda tx: tx.write(breaks)))
        good = [asyncio.create_task(_create.create_experiment(b.service, b_config())) for _ in range(3)]
        with pytest.raises(MasterError, match="a broken write"):
            await bad
        numbers = [(await g).id for g in good]
        assert len(set(numbers)) == 3
        for number in numbers:
            assert await b.ended(number) == "COMPLETED"
            await b.check_replay(number)


async def test_effect_that_fails_leaves_what_was_decided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(tmp_path, train) as b:
        done: list[int] = []

        def command(tx: _actor.Transaction) -> None:
            tx.then(lambda: 1 // 0)
            tx.then(done.append, 1)

        creating = asyncio.create_task(b.create(SINGLE))
        await b.until(lambda: b.service.live.experiments)  # while it is written, the next ones share a transaction
        bad = asyncio.create_task(b.service.actor.do(command))
        more = asyncio.create_task(b.create(SINGLE))
        await bad
        numbers = [await creating, await more]
        assert [view.id for view in await experiments_of(b.service)] == numbers
        assert done == [1]
        assert "ZeroDivisionError" in caplog.text


async def test_an_end_that_could_not_be_recorded_is_recorded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_actor, "RETRY", 0.05)

    may_end = asyncio.Event()

    async def script(trial: Trial) -> int:
        await may_end.wait()
        return 0

    async with bench(tmp_path, script) as b:
        number = await b.create(SINGLE)
        await b.until(lambda: b.engine.running)
        refusing = Refusing(b.dying, 3)
        may_end.set()
        assert await b.ended(number) == "COMPLETED"
        assert refusing.left == 0


async def test_decision_that_raises_is_logged_once_and_tried_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_actor, "RETRY", 0.01)
    times: list[float] = []

    def command(tx: _actor.Transaction) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 5:
            raise ZeroDivisionError("a mistake of ours")

    async with bench(tmp_path, train) as b:
        b.service.actor.post(command)
        await b.until(lambda: len(times) == 5)
    assert times[-1] - times[0] > 0.01 * (1 + 2 + 4 + 8) - 0.01
    assert caplog.text.count("Traceback") == 1


async def test_deletion_that_meets_a_database_error_is_tried_again(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        number = await b.create(SINGLE)
        await b.ended(number)
        await _retention.delete_experiment(b.service, number)
        refusing = Refusing(b.dying, 1)
        while True:
            try:
                await _queries.experiment(b.service, number)
            except NotFound:
                break
            await asyncio.sleep(0.05)
        assert refusing.left == 0


async def test_deletions_that_hang_hold_up_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    hanging: list[str] = []

    def hang(_hub: object, _config: object, uuid: str, _globs: object) -> dict[str, int]:
        hanging.append(uuid)
        go_on.wait()
        return {}

    monkeypatch.setattr(_retention, "_delete", hang)
    async with bench(tmp_path, train, slots=8) as b:
        for number in [await b.create(SINGLE) for _ in range(8)]:
            await b.ended(number)  # its checkpoints are not to be kept
        await b.until(lambda: len(hanging) >= 8)
        assert await b.ended(await b.create(SINGLE)) == "COMPLETED"
        go_on.set()
