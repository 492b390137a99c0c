"""The conformance suite for stores finds stores that are wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from det_core.storage import DirectoryStore, Store
from support.store_suite import CheckpointStoreSuite


class Forgetful(DirectoryStore):
    """Lists nothing."""

    def list(self, run_id: str | None = None) -> list:  # type: ignore[type-arg]
        return []


class Suite(CheckpointStoreSuite):
    def make_store(self, folder: Path) -> Store:
        return Forgetful(folder, visibility_timeout=0.1)

    def damage(self, store: Store, storage_id: str, path: str, change: Callable[[bytes], bytes] | None) -> None:
        """This store's bytes cannot be damaged, it says."""

    def beside(self, store: Store, name: str) -> bytes:
        return Path(store.root, name).read_bytes()


def failing(names: Collection[str], folder: Path) -> set[str]:
    found = set()
    for name in names:
        (folder / name).mkdir()
        try:
            getattr(Suite(), name)(folder / name)
        except AssertionError:
            found.add(name)
    return found


def test_a_wrong_store_fails_the_suite(tmp_path: Path) -> None:
    names = [name for name, _ in inspect.getmembers(Suite, inspect.isfunction) if name.startswith("test_")]
    assert len(names) > 20
    assert failing(names, tmp_path) >= {
        "test_the_list_is_sorted_by_restart_and_ordinal",
        "test_two_checkpoints_are_written_at_a_time",
        "test_a_flipped_byte_is_found",
        "test_parts_of_a_check_cover_every_byte_once",
        "test_delete_removes_what_globs_match",
    }


def test_the_suite_needs_both_answers() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CheckpointStoreSuite()  # type: ignore[abstract]
