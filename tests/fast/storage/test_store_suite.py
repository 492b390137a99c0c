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
        """Claim that this store's bytes cannot be damaged."""

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


def test_suite_fails_for_a_wrong_store(tmp_path: Path) -> None:
    names = [name for name, _ in inspect.getmembers(Suite, inspect.isfunction) if name.startswith("test_")]
    assert len(names) > 20
    assert failing(names, tmp_path) >= {
        "test_list_is_sorted_by_restart_and_ordinal",
        "test_two_checkpoints_can_be_written_at_once",
        "test_check_detects_a_flipped_byte",
        "test_check_in_parts_covers_every_byte_once",
        "test_delete_with_globs_removes_matching_files",
    }


def test_suite_needs_both_answers() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CheckpointStoreSuite()  # type: ignore[abstract]
