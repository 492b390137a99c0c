"""Pauses, ``kill -9`` of trials, of supervisors, of the master and of everything at once: the search goes on.

Real masters, engines and scripts. What must be so at the end is read from the master's store.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from support import EXAMPLES, chaos_checks
from support.chaos import TRIAL, Machine, machine, trouble
from support.mastered import bench, config_of, train

SMALL = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 3}
QUICKSTART = EXAMPLES / "quickstart" / "train.py"
LARGE = {"name": "async_halving", "max_length": 9, "num_rungs": 3, "divisor": 3, "max_trials": 5}
KINDS = ["pause", "trial", "master", "reboot", "supervisor"]


def config(m: Machine, searcher: dict[str, Any], **more: Any) -> dict[str, Any]:
    keep = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
    given = {
        "entrypoint": "python train.py",
        "max_restarts": 1000,
        "checkpoint_storage": {"type": "directory", "container_path": str(m.saved), **keep},
        **more,
    }
    return config_of(searcher, **given)


def calm_course(folder: Path, searcher: dict[str, Any]) -> dict[str, Any]:
    """What an undisturbed run of the same seed on one slot records, with trials in this process."""

    async def work() -> dict[str, Any]:
        async with bench(folder, train) as b:
            number = await b.create(searcher)
            assert await b.ended(number) == "COMPLETED"
            return await b.store.read(lambda conn: chaos_checks.course(conn, number))

    folder.mkdir()
    return asyncio.run(work())


def disturbed(
    folder: Path,
    slots: int,
    seed: int,
    searcher: dict[str, Any],
    kinds: list[str],
    *,
    script: Path = TRIAL,
    longest: float = 0.7,
    **more: Any,
) -> Machine:
    """A run with troubles, ``longest`` seconds apart at most; afterwards the master is stopped, and no process left."""
    with machine(folder, slots, seed, script) as m:
        number = m.create(config(m, searcher, **more))
        try:
            trouble(m, number, kinds, longest)
            assert m.ended(number, 300) == "COMPLETED"
        except BaseException:
            print(f"seed {seed}: {dict(m.moments)}\n{m.last_words()}")
            raise
        m.stop_master()
        left = m.processes() | {process for process in m.seen if process.alive}
        assert not left, f"seed {seed}: processes outlive the experiment: {left}"
        print(f"seed {seed}, {slots} slot(s): {dict(m.moments)}")
        return m


def check(m: Machine, calm: dict[str, Any] | None) -> dict[str, list[int]]:
    """Nothing is lost, doubled or damaged; the course is the calm one. Returns the steps of the checkpoints kept."""

    def look(conn: Connection) -> dict[str, list[int]]:
        chaos_checks.nothing_lost_or_doubled(conn, 1, m.moments["trial"])
        chaos_checks.as_scripted(conn, 1)
        chaos_checks.whole_logs(conn, 1)
        if calm is not None:
            assert chaos_checks.course(conn, 1) == calm
        return chaos_checks.steps_kept(conn, 1, m.saved, m.moments.total() * m.slots)

    return chaos_checks.reading(m.home, look)


def some_kinds(seed: int, count: int) -> list[str]:
    """Which troubles to make: each kind in its turn, in a random order."""
    kinds = [KINDS[(seed + i) % len(KINDS)] for i in range(count)]
    random.Random(seed).shuffle(kinds)
    return kinds


def test_some_moments_on_one_slot(tmp_path: Path) -> None:
    calm = calm_course(tmp_path / "calm", SMALL)
    m = disturbed(tmp_path / "disturbed", 1, 1, SMALL, ["trial", "reboot", "pause"], longest=0.3)
    check(m, calm)
    assert m.moments.total() == 3


def test_some_moments_on_two_slots(tmp_path: Path) -> None:
    m = disturbed(tmp_path / "disturbed", 2, 2, SMALL, ["master", "trial"], longest=0.3)
    check(m, None)
    assert m.moments.total() >= 1


def many(folder: Path, slots: int, first_seed: int, calm: dict[str, Any] | None, count: int = 50) -> None:
    """Runs until there were so many moments."""
    moments: Counter[str] = Counter()
    seed = first_seed
    kept = check(disturbed(folder / "undisturbed", slots, seed, LARGE, []), calm)  # with real processes, too
    while moments.total() < count:
        seed += 1
        m = disturbed(folder / f"{seed}", slots, seed, LARGE, some_kinds(seed, 6))
        steps = check(m, calm)
        assert calm is None or steps == kept, f"seed {seed}"
        moments += m.moments
    print(f"{moments.total()} moments on {slots} slot(s), seeds {first_seed + 1} to {seed}: {dict(moments)}")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_50_moments_on_one_slot(tmp_path: Path) -> None:
    many(tmp_path, 1, 1000, calm_course(tmp_path / "calm", LARGE))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_50_moments_on_two_slots(tmp_path: Path) -> None:
    many(tmp_path, 2, 2000, None)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_5_moments_with_the_quickstart(tmp_path: Path) -> None:
    if not find_spec("torch") or not find_spec("sklearn"):  # not imported here: torch sets variables
        pytest.skip("the quickstart needs torch and scikit-learn: pip install 'det_core[torch,examples]'")
    moments: Counter[str] = Counter()
    seed = 3000
    while moments.total() < 5:
        seed += 1
        m = disturbed(
            tmp_path / f"{seed}",
            2,
            seed,
            {**SMALL, "max_length": {"epochs": 4}, "metric": "accuracy", "smaller_is_better": False},
            some_kinds(seed, 2),
            script=QUICKSTART,
            longest=6.0,
            hyperparameters={"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2}, "width": 8},
            environment={"environment_variables": ["OMP_NUM_THREADS=1"]},
        )
        moments += m.moments
        chaos_checks.reading(m.home, lambda conn: _check_quickstart(conn, m))  # noqa: B023
    print(f"{moments.total()} moments with the quickstart, seeds 3001 to {seed}: {dict(moments)}")


def _check_quickstart(conn: Connection, m: Machine) -> None:
    chaos_checks.nothing_lost_or_doubled(conn, 1, m.moments["trial"])
    chaos_checks.as_the_quickstart(conn, 1)
    chaos_checks.steps_kept(conn, 1, m.saved, m.moments.total() * m.slots)
