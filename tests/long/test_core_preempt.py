"""Stops by signals, by requests and by the master, a thousand times and more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fast.core.test_preempt import signal_every_round
from fast.core.test_preempt_request import requests, requests_and_pauses, requests_and_signals


@pytest.fixture
def seed() -> int:
    """Draw a seed and print it."""
    drawn = random.randrange(10**6)
    print(f"seed {drawn}")
    return drawn


@pytest.mark.parametrize("size", [2, 4, 8])
def test_signal_to_any_rank_stops_all_at_one_call(size: int, seed: int, tmp_path: Path) -> None:
    signal_every_round(tmp_path, size, 1000, seed)


def test_request_on_any_rank_stops_all_at_one_call(seed: int, tmp_path: Path) -> None:
    requests(tmp_path, 1000, seed)


@pytest.mark.parametrize("size", [1, 4])
def test_request_and_signal_at_one_moment_is_a_preemption(size: int, seed: int, tmp_path: Path) -> None:
    requests_and_signals(tmp_path, size, 300, seed)


def test_request_and_masters_preemption_at_one_moment_agree(seed: int, tmp_path: Path) -> None:
    requests_and_pauses(tmp_path, 50, seed)
