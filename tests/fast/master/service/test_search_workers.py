"""A search that runs a user's code stops nothing but itself: it waits, hangs, dies or lies in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from det_core._standalone.processes import start_time
from det_core.config import parse_experiment
from det_core.master._errors import Invalid, NotFound
from det_core.master.service import _create, _lifecycle, _queries, _retention, _search_workers, _steering
from support.mastered import Bench, bench, config_of, train, trials_of
from support.search_methods import CUSTOM, Method

SINGLE = {"name": "single", "max_length": 2}


def pid_of(b: Bench, number: int) -> int:
    """Return the process of an experiment's search."""
    process = b.service.workers[number]._process
    assert process is not None
    return process.pid


async def test_search_that_takes_long_holds_up_nothing_else(tmp_path: Path) -> None:
    method = Method(tmp_path, "wait_for_flag()")
    async with bench(tmp_path, train, slots=2) as b:
        number = await method.create(b)
        await b.until(lambda: method.is_asked)
        assert (_queries.master(b.service))["slots_in_use"]
        other = await b.create(SINGLE)
        assert await b.ended(other) == "COMPLETED", "reports were taken, and another search decided"
        assert (await _queries.experiment(b.service, number)).state == "ACTIVE"
        method.flag.touch()
        assert await b.ended(number) == "COMPLETED"
        (trial,) = await trials_of(b.service, number)
        assert (trial.operation_length, trial.hparams) == (4, {"lr": 0.5})
        assert trial.trial_run_id == 1, "it waited for the decision, and did not exit"
        assert (await _queries.experiment(b.service, number)).progress == 1.0
        await b.until(lambda: not b.service.workers)


async def test_search_that_hangs_is_reported_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_search_workers, "SLOW", 0.1)
    method = Method(tmp_path, "hold_the_interpreter()")
    async with bench(tmp_path, train) as b:
        number = await method.create(b)
        pid = pid_of(b, number)
        await b.until(lambda: method.is_asked)
        while not (await _queries.experiment(b.service, number)).remarks:
            await asyncio.sleep(0.01)
        (remark,) = (await _queries.experiment(b.service, number)).remarks
        assert "has not answered Completed(" in remark
        assert remark.partition(" for ")[0] in caplog.text
        await _steering.kill(b.service, number)
        assert await b.ended(number) == "CANCELED"
        await b.until(lambda: start_time(pid) is None)
        await _retention.delete_experiment(b.service, number)
        with pytest.raises(NotFound):
            while True:
                await _queries.experiment(b.service, number)
                await asyncio.sleep(0.01)


async def test_trial_does_not_wait_for_ever_for_its_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.master.service._operations.DECISION_TIMEOUT", 0.1)
    method = Method(tmp_path, "wait_for_flag()")
    async with bench(tmp_path, train) as b:
        number = await method.create(b)
        await b.until(lambda: method.is_asked and not b.service.live.allocations)
        assert await b.ended(await b.create(SINGLE)) == "COMPLETED", "its slot is free"
        await _steering.pause(b.service, number)
        method.flag.touch()
        await b.until(lambda: not b.service.live.experiments[number].unanswered)
        await _steering.activate(b.service, number)
        assert await b.ended(number) == "COMPLETED"
        (trial,) = await trials_of(b.service, number)
        assert (trial.operation_length, trial.trial_run_id, trial.restarts) == (4, 2, 0)


async def test_event_without_an_answer_is_asked_again_by_the_next_master(tmp_path: Path) -> None:
    method = Method(tmp_path, "hold_the_interpreter()")
    async with bench(tmp_path, train) as b:
        number = await method.create(b)
        pid = pid_of(b, number)
        await b.until(lambda: method.is_asked)
        b.dying.dead.set()
        await b.revive()
        assert start_time(pid) is None, "it ends with its master, although it holds the interpreter"
        await _steering.pause(b.service, number)
        await _lifecycle.stop(b.service)
        method.flag.touch()
        b.dying.dead.set()
        await b.revive()
        await _steering.activate(b.service, number)
        assert await b.ended(number) == "COMPLETED"
        assert list(b.reader(number).operations().values()) == [[(2, 0.5333333333333333), (4, 0.4)]]


async def test_search_that_hangs_at_its_replay_is_killed(tmp_path: Path) -> None:
    method = Method(tmp_path, "wait_for_flag()", init=f"os.path.exists('{tmp_path}/stuck') and time.sleep(600)")
    async with bench(tmp_path, train) as b:
        number = await method.create(b)
        await b.until(lambda: method.is_asked)
        (tmp_path / "stuck").touch()
        b.dying.dead.set()
        await b.revive()
        await b.until(lambda: b.service.workers[number].is_open)
        pid = pid_of(b, number)
        await _steering.kill(b.service, number)
        assert await b.ended(number) == "CANCELED"
        await b.until(lambda: start_time(pid) is None)


async def test_process_of_a_search_that_dies_is_started_again_once(tmp_path: Path) -> None:
    method = Method(tmp_path, "wait_for_flag()")
    async with bench(tmp_path, train) as b:
        number = await method.create(b)
        await b.until(lambda: method.is_asked)
        first = pid_of(b, number)
        os.kill(first, signal.SIGKILL)
        await b.until(lambda: b.service.workers[number].is_open and pid_of(b, number) != first)
        other = await method.create(b)
        method.flag.touch()
        assert await b.ended(number) == await b.ended(other) == "COMPLETED"

    dying = Method(tmp_path, "os._exit(3)")
    async with bench(tmp_path, train) as b:
        number = await dying.create(b)
        assert await b.ended(number) == "ERROR"
        error = str((await _queries.experiment(b.service, number)).error)
        assert "its search failed at Completed(" in error
        assert "its process exited with status 3" in error


async def test_close_that_was_cancelled_is_finished_by_the_next() -> None:
    """A master that stops gives up its tasks, also one that waits for the process of a search to be gone."""
    worker = _search_workers.SearchWorker(parse_experiment(config_of(SINGLE), default_seed=1), None)
    await worker.open()
    process = worker._process
    assert process is not None
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    await worker.close()
    assert process.returncode is not None and not worker.is_open


@pytest.mark.parametrize(
    ("completed", "error"),
    [
        ("raise RuntimeError('no idea')", "no idea"),
        ("sys.exit('enough')", "SystemExit: enough"),
        ("return [self.create({'lr': {1, 2}})]", "its decision cannot be recorded: TypeError"),
        ("return ['train']", "AttributeError"),
    ],
)
async def test_what_a_method_raises_or_returns_ends_its_experiment(tmp_path: Path, completed: str, error: str) -> None:
    method = Method(tmp_path, completed)
    async with bench(tmp_path, train) as b:
        number = await method.create(b)
        assert await b.ended(number) == "ERROR"
        assert error in str((await _queries.experiment(b.service, number)).error)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"init": "time.sleep(60)"}, "has not started within 0 s"),
        ({"head": "time.sleep(60)"}, "has not started within 0 s"),
        ({"init": "raise RuntimeError('no idea')"}, "RuntimeError: no idea"),
        ({"head": "import nothing_of_that_name"}, "nothing_of_that_name"),
    ],
)
async def test_method_that_does_not_start_is_refused_and_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], error: str
) -> None:
    method = Method(tmp_path, **parts)
    async with bench(tmp_path, train) as b:
        # More than the threads of the loop's pool.
        bad = [asyncio.create_task(method.create(b)) for _ in range(3)]
        assert await b.ended(await b.create(SINGLE)) == "COMPLETED"
        if "sleep" in str(parts):
            monkeypatch.setattr(_search_workers, "START_TIMEOUT", 0.1)
            bad = [asyncio.create_task(method.create(b))]
        for task in bad:
            with pytest.raises(Invalid, match=error):
                await task


async def test_method_that_is_gone_ends_its_experiment_and_no_other(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        created = await _create.create_experiment(
            b.service, config_of(CUSTOM), Method(tmp_path).context, activate=False
        )
        other = await b.create(SINGLE)
        (folder,) = (tmp_path / "master" / "searchers").iterdir()
        (folder / "mine.py").write_text("import nothing_of_that_name")
        b.dying.dead.set()
        await b.revive()
        number = created.id
        assert await b.ended(number) == "ERROR"
        assert "nothing_of_that_name" in str((await _queries.experiment(b.service, number)).error)
        assert await b.ended(other) == "COMPLETED"
