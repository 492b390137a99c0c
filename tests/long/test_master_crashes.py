"""Death of the master at every commit, troubles at random moments, and clients that outlive their master."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from fast.master.engines.test_engine_kills import kill_at_random
from fast.master.service.test_crashes import die_at
from fast.master.service.test_random_trouble import run
from fast.master.test_recipe import SINGLE, where
from support.processes import until
from support.real_master import real_master
from support.recipe import completed, config, files, last_row

__all__ = ["where"]


@pytest.mark.parametrize("slots", [1, 2])
def test_death_at_every_commit(tmp_path: Path, slots: int) -> None:
    asyncio.run(die_at(tmp_path, slots, range(1, 1000)))


@pytest.mark.parametrize("slots", [1, 2])
def test_50_random_moments(tmp_path: Path, slots: int) -> None:
    calm = asyncio.run(run(tmp_path / "calm", slots, None))
    first = random.randrange(1 << 30)
    for seed in range(first, first + 50):
        print(f"seed {seed}")
        found = asyncio.run(run(tmp_path / f"{seed}", slots, seed, times=8))
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
