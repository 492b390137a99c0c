"""Experiments whose trials are run by others (wire contract, §9)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import Fenced, Invalid, WrongState
from det_core.master.service import (
    _checkpoints,
    _continue,
    _create,
    _operations,
    _queries,
    _reports,
    _steering,
    _unmanaged,
)
from det_core.protocol.records import StartView
from support.mastered import bench, train

CONFIG: dict[str, Any] = {"name": "mine", "searcher": {"name": "single", "metric": "loss", "max_length": 100000000}}


async def test_the_course_of_an_unmanaged_experiment(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        s = b.service
        made = await asyncio.gather(*(_create.put_experiment(s, "E", CONFIG) for _ in range(3)))
        assert len({c.id for c in made}) == 1
        number = made[0].id
        trials = await asyncio.gather(
            *(_unmanaged.create_trial(s, number, {"lr": 1}, external_id="T") for _ in range(3))
        )
        assert {t.id for t in trials} == {trials[0].id} and trials[0].task_id == f"{number}.T"
        trial = trials[0].id
        assert await _unmanaged.start_trial(s, trial, resume=False) == StartView(trial_run_id=1, steps_completed=0)
        with pytest.raises(WrongState, match="resume"):
            await _unmanaged.start_trial(s, trial, resume=False)
        assert (await _unmanaged.patch_trial(s, trial, state="RUNNING")).state == "RUNNING"
        assert (await _queries.experiment(s, number)).state == "RUNNING"
        await _operations.progress(s, trial, 0.25, is_raw=True)
        assert (await _queries.trial(s, trial)).progress == 0.25
        await _operations.progress(s, trial, 75_000_000)
        assert (await _queries.trial(s, trial)).progress == 0.75
        await _reports.report_metrics(s, trial, 1, "validation", 3, {"loss": 0.5})
        assert await _reports.journal(s, trial, 1, 0, []) == 0
        await _checkpoints.register(s, "c", f"{number}.T", metadata={"steps_completed": 3}, resources={})
        again = await _unmanaged.start_trial(s, trial, resume=True)
        assert again == StartView(trial_run_id=2, steps_completed=3, latest_checkpoint="c")
        with pytest.raises(Fenced):
            await _reports.report_metrics(s, trial, 1, "validation", 4, {"loss": 0.5})
        with pytest.raises(Invalid, match="state"):
            await _unmanaged.patch_trial(s, trial, state="DREAMING")
        assert (await _unmanaged.patch_trial(s, trial, state="COMPLETED")).state == "COMPLETED"
        with pytest.raises(Fenced):
            await _operations.progress(s, trial, 0.5, is_raw=True)
        ended = await _queries.wait(s, number, 10)
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


async def test_who_gives_no_sign_of_life_is_taken_for_dead(tmp_path: Path) -> None:
    async with bench(tmp_path, train, unmanaged_timeout=5, sweep_interval=0.05) as b:
        number = (await _create.create_experiment(b.service, CONFIG, unmanaged=True)).id
        quiet, alive = [(await _unmanaged.create_trial(b.service, number, {})).id for _ in range(2)]
        while (await _queries.trial(b.service, quiet)).state != "ERROR":
            await _unmanaged.patch_trial(b.service, alive)
            await asyncio.sleep(0.05)
        assert (await _queries.trial(b.service, quiet)).state == "ERROR"
        assert (await _queries.trial(b.service, alive)).end_time is None


async def test_jump_of_the_clock_buries_no_trial_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 0.0
    monkeypatch.setattr("det_core._clock.now", lambda: time.time() + ahead)
    async with bench(tmp_path, train, unmanaged_timeout=300, sweep_interval=0.01) as b:
        number = (await _create.create_experiment(b.service, CONFIG, unmanaged=True)).id
        trial = (await _unmanaged.create_trial(b.service, number, {})).id
        ahead = 600.0  # the machine slept
        await asyncio.sleep(0.1)  # some sweeps
        assert (await _queries.trial(b.service, trial)).state == "ACTIVE"
