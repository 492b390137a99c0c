"""The accelerated Trainer, killed twenty times: it ends as if it had been left alone, to the last bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.accelerated import assert_same, script
from support.killed import drawn
from support.real_master import RealMaster
from trainings.test_accelerated_resume import assert_as_straight
from trainings.test_accelerated_resume_managed import Job, master

__all__ = ["master"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_case_38_killed_at_20_random_moments(tmp_path: Path, ranks: int) -> None:
    rng = drawn()
    straight = script(tmp_path / "straight", ranks)
    straight.finished()
    for round_ in range(4):
        other = script(tmp_path / f"disturbed-{round_}", ranks, PACE="0.03")
        for _ in range(5):
            number = rng.choice([signal.SIGKILL] * 3 + [signal.SIGTERM])
            other.disturbed_at(rng.randrange(1, 4), number, rng)
        other.finished()
        assert_as_straight(other, straight)


@pytest.mark.parametrize("slots", [1, 2])
def test_killed_20_times_and_paused_at_a_master(master: RealMaster, tmp_path: Path, slots: int) -> None:
    rng = drawn()
    straight = Job(master, tmp_path / "straight", slots).ended()
    for round_ in range(5):
        job = Job(master, tmp_path / f"disturbed-{round_}", slots, pace=0.05)
        for _ in range(4):
            job.kill_one(rng.randrange(1, 5), rng)
        job.pause()
        state, reported, batches = job.ended()
        assert (reported, batches) == straight[1:]
        assert_same(state, straight[0])
