"""Every rank is killed in every collective at any moment; a rank that sleeps for long."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fast.ipc.test_liveness import kill_one, sleep_while_the_chief_closes


@pytest.fixture(scope="module")
def moments() -> random.Random:
    seed = random.randrange(10**6)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.parametrize("collective", ["gather", "allgather", "broadcast", "gather_local", "allgather_local"])
@pytest.mark.parametrize("children", [0, 2])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_kill_of_every_rank_in_every_collective_raises_peer_lost(
    tmp_path: Path, moments: random.Random, size: int, children: int, collective: str
) -> None:
    for victim in range(size):
        kill_one(tmp_path, size, victim, collective, children=children, delay=moments.uniform(0, 0.2))


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_over_tcp_with_children_raises_peer_lost(tmp_path: Path, victim: int) -> None:
    kill_one(tmp_path, 3, victim, "allgather", children=2, tcp=True)


def test_rank_asleep_for_half_a_minute_loses_no_broadcast(tmp_path: Path) -> None:
    sleep_while_the_chief_closes(tmp_path, seconds=30)
