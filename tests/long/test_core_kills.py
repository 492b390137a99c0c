"""``kill -9`` by the hundred, and every call of the disk in every way, while checkpoints are saved."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fast.core import test_checkpoint_faults as faults
from fast.core.test_checkpoint_faults import memory
from fast.core.test_checkpoint_kills import kills, saves
from fast.core.test_checkpoint_retention import die_in_a_gc, every_call_of_a_gc_fails_once
from fast.core.test_checkpoint_store import killed_writers

__all__ = ["memory"]
HOW = ["EIO", "ENOSPC", "short", "dead"]


@pytest.fixture
def seed() -> int:
    """Draw a seed and print it."""
    drawn = random.randrange(10**6)
    print(f"seed {drawn}")
    return drawn


def test_many_kills_keep_the_newest_checkpoint(seed: int, tmp_path: Path) -> None:
    kills(tmp_path, 200, seed)


def test_many_kills_while_states_are_saved(seed: int, tmp_path: Path) -> None:
    saves(tmp_path, 200, seed)


def test_many_killed_writers_leave_intact_checkpoints(seed: int, tmp_path: Path) -> None:
    killed_writers(tmp_path, 100, seed)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "operation",
    [
        faults.upload, faults.store_path, faults.upload_in_background, faults.store_path_in_background,
        faults.save_in_background,
    ],
)  # fmt: skip
def test_save_fault_at_every_call_leaves_intact_checkpoints(
    operation: faults.Operation, how: str, memory: Path
) -> None:
    faults.test_a_checkpoint_is_listed_and_registered_or_it_is_not_there(operation, how, memory)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("existing", [False, True])
def test_download_fault_at_every_call_leaves_intact_files(existing: bool, how: str, memory: Path) -> None:
    faults.test_download_that_fails_leaves_the_folder_as_it_was(existing, how, memory)


@pytest.mark.parametrize("name", ["upload_in_background", "store_path", "store_path_in_background"])
def test_death_at_every_call(name: str, memory: Path) -> None:
    faults.test_death_at_every_call(name, memory)


@pytest.mark.parametrize("how", ["EIO", "ENOSPC", "dead"])
@pytest.mark.parametrize("committed", [None, 4])
def test_gc_fault_at_every_call_leaves_intact_checkpoints(how: str, committed: int | None, memory: Path) -> None:
    every_call_of_a_gc_fails_once(how, committed, memory)


def test_death_at_every_call_of_a_gc(memory: Path) -> None:
    die_in_a_gc(memory, every=1)
