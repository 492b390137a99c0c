"""The calls of a directory store at the beginning of a checkpoint."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from det_core.errors import StorageError
from det_core.storage import DirectoryStore, Header, Owner
from support.disks import Counting

OWNER = Owner.current("run", 0)
DEAD = replace(OWNER, pid=2**22 + 1, started=5)


def save(store: DirectoryStore, storage_id: str, owner: Owner = OWNER) -> None:
    staging = store.begin(storage_id, owner)
    staging.commit({}, [], {"steps_completed": 1}, Header("run", 0, 1, "2026-11-23T00:00:00Z", 1, storage_id))


def left_by_the_dead(store: DirectoryStore) -> Path:
    folder = Path(store.root, ".det_core-tmp", f"left.{DEAD.tag}")
    folder.mkdir(parents=True)
    return folder


def test_begin_collects_once_per_owner(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    left = left_by_the_dead(store)
    save(store, "one")
    assert not left.exists()
    left = left_by_the_dead(store)
    save(store, "two")
    assert left.exists()
    save(store, "three", Owner.current("run", 1))
    assert not left.exists()


def test_later_begin_takes_two_calls(tmp_path: Path) -> None:
    disk = Counting()
    store = DirectoryStore(tmp_path / "store", disk=disk)
    save(store, "one")
    disk.done.clear()
    store.begin("two", OWNER)
    assert disk.done == [("make folder", f"{tmp_path}/store/.det_core-tmp/two.{OWNER.tag}")] * 2


@pytest.mark.parametrize("gone", [".", ".det_core-tmp"])
def test_begin_with_removed_root_creates_it_again(gone: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    save(store, "one")
    shutil.rmtree(tmp_path / "store" / gone)
    save(store, "two")
    assert "two" in [found.storage_id for found in store.list()]


def test_begin_with_a_failing_disk_raises_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "store")
    save(store, "one")

    def refuse(path: str, *_: object) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"store: cannot make folder .*/two\..*: No space left on device"):
        store.begin("two", OWNER)
