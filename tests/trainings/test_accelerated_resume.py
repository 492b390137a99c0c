"""A training that is killed or paused ends as one that was left alone: to the last bit."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest

from support.accelerated import Training, assert_same, script

pytest.importorskip("torch")
pytest.importorskip("accelerate")

EPOCHS, BATCHES = 5, {1: 9, 2: 5}
"""Batches of a rank in an epoch, by the number of ranks."""
UPDATES = {1: 25, 2: 15}


def assert_as_straight(other: Training, straight: Training) -> None:
    """Assert that the training equals the straight one in all its state.

    Weights, optimizer, averages, schedule, history, callbacks, random states; the data, batch by batch; the reports.
    """
    whole, mine = straight.batches(), other.batches()
    assert len(whole) == EPOCHS * BATCHES[straight.ranks] * straight.ranks
    assert mine.keys() == whole.keys()
    for place, told in mine.items():
        assert all(one == whole[place][0] for one in told), place
    assert_same(other.ends(), straight.ends())
    for group in ("training", "validation"):
        rows = [
            [
                (step, {k: v for k, v in metrics.items() if k != "samples_per_second"})
                for step, metrics, _ in one.rows(group)
            ]
            for one in (other, straight)
        ]
        assert rows[0] == rows[1] and rows[0][-1][0] == UPDATES[straight.ranks], group


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"EVERY": "epoch"}),
        (2, {"WORKERS": "0"}),
        # Two workers give five batches of a half of the records each, and every rank takes five of these ten.
        (2, {"KIND": "resumable stream", "RECORDS": "80"}),
    ],
    ids=["epochs", "ranks", "resumable stream"],
)
def test_case_38_killed_and_paused_ends_as_straight(tmp_path: Path, ranks: int, options: dict[str, str]) -> None:
    rng = random.Random(ranks)
    straight, other = (script(tmp_path / name, ranks, **options) for name in ("straight", "disturbed"))
    straight.finished()
    half = EPOCHS * BATCHES[ranks] // 2
    other.disturbed_at(rng.randrange(1, half), signal.SIGKILL, rng)
    number = rng.choice([signal.SIGTERM, signal.SIGUSR1])
    printed = other.disturbed_at(rng.randrange(1, half - 3), number, rng)
    stopped = re.findall(r"DONE run 1 at (\d+) preempted True", printed)
    assert len(stopped) == ranks and len(set(stopped)) == 1 and f"PREEMPTED at {stopped[0]}" in printed, printed
    printed = other.finished()
    assert "Resumed at batch" in printed
    assert_as_straight(other, straight)
