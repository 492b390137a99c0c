"""Death of the master at every commit, troubles at random moments, and clients that outlive their master."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import WrongState
from det_core.master.service import _steering
from fast.master.test_recipe import SINGLE, where
from support.crashes import die_at
from support.engine_kills import kill_at_random
from support.mastered import Bench, bench, train
from support.processes import until
from support.real_master import real_master
from support.recipe import completed, config, files, last_row

__all__ = ["where"]
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


async def run(folder: Path, slots: int, seed: int | None, times: int) -> dict[str, Any]:
    folder.mkdir()
    async with bench(folder, train, slots) as b:
        number = await b.create(ASHA, max_restarts=1000)
        if seed is not None:
            await trouble(b, number, random.Random(seed), times)
        assert await b.ended(number) == "COMPLETED"
        await b.check_replay(number)
        return course(await b.record(number))


@pytest.mark.parametrize("slots", [1, 2])
def test_death_at_every_commit(tmp_path: Path, slots: int) -> None:
    asyncio.run(die_at(tmp_path, slots, range(1, 1000)))


@pytest.mark.parametrize("slots", [1, 2])
def test_50_random_moments(tmp_path: Path, slots: int) -> None:
    calm = asyncio.run(run(tmp_path / "calm", slots, None, 0))
    first = random.randrange(1 << 30)
    for seed in range(first, first + 50):
        print(f"seed {seed}")
        found = asyncio.run(run(tmp_path / f"{seed}", slots, seed, 8))
        if slots == 1:
            assert found == calm, f"seed {seed}"


@pytest.mark.parametrize("number", range(40))
def test_many_kills_at_random_moments(tmp_path: Path, number: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kill_at_random(tmp_path, seed)


def test_clients_of_both_generations_outlive_their_master(where: str, tmp_path: Path) -> None:
    with real_master(tmp_path / "home", "--slots", "2") as real:
        scripts = (f"older.py {where} 0.37", f"newer.py {where}")
        store = tmp_path / "store"
        numbers = [real.create(config(script, store, SINGLE, pace=0.5, wait_at=5), files()) for script in scripts]
        for number in numbers:
            until(lambda number=number: last_row(real, number) == (5, 1))
        real.kill()
        real.start()
        for number in numbers:
            assert real.post(f"experiments/{number}/pause") == {}
            until(lambda number=number: "allocationId" not in real.trials(number)[0])
            assert real.post(f"experiments/{number}/activate") == {}
        for number in numbers:
            trial = completed(real, number)
            assert (trial["trialRunId"], trial["restarts"]) == (2, 0)
            assert [r["totalBatches"] for r in real.rows(trial["id"], "training")] == list(range(1, 9))
