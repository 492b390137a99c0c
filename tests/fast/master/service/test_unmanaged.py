"""Experiments whose trials are run by others (wire contract, §9)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import Fenced, Invalid, WrongState
from det_core.master.service import _continue, _steering
from support.mastered import bench, train

CONFIG: dict[str, Any] = {"name": "mine", "searcher": {"name": "single", "metric": "loss", "max_length": 100000000}}


def test_the_course_of_an_unmanaged_experiment(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, train) as b:
            s = b.service
            made = await asyncio.gather(*(s.put_experiment("E", CONFIG) for _ in range(3)))
            assert len({c["experiment"].id for c in made}) == 1
            number = made[0]["experiment"].id
            trials = await asyncio.gather(*(s.put_trial(number, "T", {"lr": 1}) for _ in range(3)))
            assert {t.id for t in trials} == {trials[0].id} and trials[0].task_id == f"{number}.T"
            trial = trials[0].id
            assert await s.start_trial(trial, resume=False) == {
                "trial_run_id": 1,
                "steps_completed": 0,
                "latest_checkpoint": None,
            }
            with pytest.raises(WrongState, match="resume"):
                await s.start_trial(trial, resume=False)
            assert (await s.patch_trial(trial, state="RUNNING")).state == "RUNNING"
            assert (await s.experiment(number)).state == "RUNNING"
            await s.progress(trial, 0.25, is_raw=True)
            assert (await s.trial(trial)).progress == 0.25
            await s.progress(trial, 75_000_000)
            assert (await s.trial(trial)).progress == 0.75
            await s.report_metrics(trial, 1, "validation", 3, {"loss": 0.5})
            assert await s.journal(trial, 1, 0, []) == 0
            await s.register_checkpoint("c", f"{number}.T", metadata={"steps_completed": 3}, resources={})
            again = await s.start_trial(trial, resume=True)
            assert again == {"trial_run_id": 2, "steps_completed": 3, "latest_checkpoint": "c"}
            with pytest.raises(Fenced):
                await s.report_metrics(trial, 1, "validation", 4, {"loss": 0.5})
            with pytest.raises(Invalid, match="state"):
                await s.patch_trial(trial, state="DREAMING")
            assert (await s.patch_trial(trial, state="COMPLETED")).state == "COMPLETED"
            with pytest.raises(Fenced):
                await s.progress(trial, 0.5, is_raw=True)
            ended = await s.wait_experiment(number, 10)
            assert ended.state == "COMPLETED" and ended.best_metric == 0.5
            for refused in (
                _steering.pause(s, number),
                _steering.kill(s, number),
                _steering.kill_trial(s, trial),
                _continue.continue_experiment(s, number),
            ):
                with pytest.raises(WrongState):
                    await refused
            assert not b.engine.launched

    asyncio.run(main())


def test_a_managed_experiment_takes_none_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, train) as b:
            number = await b.create({"name": "single", "max_length": 1})
            await b.ended(number)
            for refused in (
                b.service.create_trial(number, {}),
                b.service.start_trial(1, resume=True),
                b.service.patch_trial(1, state="RUNNING"),
            ):
                with pytest.raises(WrongState):
                    await refused

    asyncio.run(main())


def test_who_gives_no_sign_of_life_is_taken_for_dead(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, train, unmanaged_timeout=5, sweep_interval=0.05) as b:
            number = (await b.service.create_experiment(CONFIG, unmanaged=True))["experiment"].id
            quiet, alive = [(await b.service.create_trial(number, {})).id for _ in range(2)]
            while (await b.service.trial(quiet)).state != "ERROR":
                await b.service.patch_trial(alive)
                await asyncio.sleep(0.05)
            assert (await b.service.trial(quiet)).state == "ERROR"
            assert (await b.service.trial(alive)).end_time is None

    asyncio.run(main())


def test_jump_of_the_clock_buries_no_trial_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 0.0
    monkeypatch.setattr("det_core._clock.now", lambda: time.time() + ahead)

    async def main() -> None:
        nonlocal ahead
        async with bench(tmp_path, train, unmanaged_timeout=300, sweep_interval=0.01) as b:
            number = (await b.service.create_experiment(CONFIG, unmanaged=True))["experiment"].id
            trial = (await b.service.create_trial(number, {})).id
            ahead = 600.0  # the machine slept
            await asyncio.sleep(0.1)  # some sweeps
            assert (await b.service.trial(trial)).state == "ACTIVE"

    asyncio.run(main())


def test_trials_are_paged_filtered_and_sorted(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, train) as b:
            number = (await b.service.create_experiment(CONFIG, unmanaged=True))["experiment"].id
            ids = [(await b.service.create_trial(number, {})).id for _ in range(5)]
            for trial, loss in zip(ids[:4], [0.3, 0.1, 0.4, 0.2], strict=True):
                await b.service.start_trial(trial, resume=False)
                await b.service.report_metrics(trial, 1, "validation", 1, {"loss": loss})
            await b.service.patch_trial(ids[0], state="COMPLETED")

            async def page(
                states: list[str], *, best_first: bool, limit: int | None, offset: int
            ) -> tuple[list[int], int]:
                views, total = await b.service.page_of_trials(
                    number, states=states, best_first=best_first, limit=limit, offset=offset
                )
                return [view.id for view in views], total

            assert await page([], best_first=False, limit=2, offset=1) == (ids[1:3], 5)
            assert await page([], best_first=True, limit=4, offset=0) == ([ids[1], ids[3], ids[0], ids[2]], 5)
            assert await page(["RUNNING"], best_first=True, limit=None, offset=1) == ([ids[3], ids[2]], 3)
            assert await page(["ACTIVE", "COMPLETED"], best_first=False, limit=9, offset=0) == ([ids[0], ids[4]], 2)

    asyncio.run(main())
