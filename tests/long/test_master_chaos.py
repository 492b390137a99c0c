"""Fifty moments of each kind of trouble; the quickstart in trouble."""

from __future__ import annotations

import random
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support import EXAMPLES, chaos_checks
from support.chaos import Machine
from support.chaos_search import SMALL, calm_course, check, disturbed
from support.master_records import RecordReader

QUICKSTART = EXAMPLES / "quickstart" / "train.py"
LARGE = {"name": "async_halving", "max_length": 9, "num_rungs": 3, "divisor": 3, "max_trials": 5}
KINDS = ["pause", "trial", "master", "reboot", "supervisor"]


def some_kinds(seed: int, count: int) -> list[str]:
    """Return the kinds of troubles to make: each in its turn, in a random order."""
    kinds = [KINDS[(seed + i) % len(KINDS)] for i in range(count)]
    random.Random(seed).shuffle(kinds)
    return kinds


def many(folder: Path, slots: int, calm: dict[str, Any] | None, count: int = 50) -> None:
    """Run disturbed experiments until the count of moments is reached."""
    moments: Counter[str] = Counter()
    first = seed = random.randrange(1 << 30)
    _, kept = disturbed(folder / "undisturbed", slots, seed, LARGE, [], check(calm))  # with real processes, too
    while moments.total() < count:
        seed += 1
        m, steps = disturbed(folder / f"{seed}", slots, seed, LARGE, some_kinds(seed, 6), check(calm))
        assert calm is None or steps == kept, f"seed {seed}"
        moments += m.moments
    print(f"{moments.total()} moments on {slots} slot(s), seeds {first + 1} to {seed}: {dict(moments)}")


def test_50_moments_on_one_slot(tmp_path: Path) -> None:
    many(tmp_path, 1, calm_course(tmp_path / "calm", LARGE))


def test_50_moments_on_two_slots(tmp_path: Path) -> None:
    many(tmp_path, 2, None)


def test_5_moments_with_the_quickstart(tmp_path: Path) -> None:
    if not find_spec("torch") or not find_spec("sklearn"):  # not imported here: torch sets variables
        pytest.skip("the quickstart needs torch and scikit-learn: pip install 'det_core[torch,examples]'")
    moments: Counter[str] = Counter()
    first = seed = random.randrange(1 << 30)
    while moments.total() < 5:
        seed += 1
        m, _ = disturbed(
            tmp_path / f"{seed}",
            2,
            seed,
            {**SMALL, "max_length": {"epochs": 4}, "metric": "accuracy", "smaller_is_better": False},
            some_kinds(seed, 2),
            _check_quickstart,
            script=QUICKSTART,
            longest=6.0,
            hyperparameters={"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2}, "width": 8},
            environment={"environment_variables": ["OMP_NUM_THREADS=1"]},
        )
        moments += m.moments
    print(f"{moments.total()} moments with the quickstart, seeds {first + 1} to {seed}: {dict(moments)}")


async def _check_quickstart(m: Machine, reader: RecordReader) -> None:
    await chaos_checks.nothing_lost_or_doubled(reader, m.moments["trial"])
    await chaos_checks.as_the_quickstart(reader)
    await chaos_checks.steps_kept(reader, m.saved, m.moments.total() * m.slots)
