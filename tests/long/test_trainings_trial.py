"""A trial that is killed twenty times, bare and at a master, ends as one that was left alone, to the last bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.killed import drawn
from support.person import Person
from trainings.test_trial_resume import disturbed_equals_straight
from trainings.test_trial_resume_managed import Experiments, kill_one, person

__all__ = ["person"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_bare(tmp_path: Path, ranks: int, workers: int) -> None:
    rng = drawn()
    for round_ in range(4):
        disturbed_equals_straight(tmp_path / str(round_), ranks, workers, [signal.SIGKILL] * 5, rng)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_at_a_master(person: Person, slots: int, workers: int) -> None:
    rng, experiments = drawn(), Experiments(person, slots, workers)
    straight = experiments.end_of(experiments.create())
    for _ in range(4):
        number, known = experiments.create(pace=0.03), set[int]()
        for kill in range(5):
            kill_one(experiments, number, 15 * kill + rng.randrange(3, 18), rng, known)
        assert experiments.end_of(number) == straight
