"""The accelerated Trainer, killed twenty times: it ends as if it had been left alone, to the last bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.accelerated import script
from support.killed import drawn
from trainings.test_accelerated_resume import assert_as_straight


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
