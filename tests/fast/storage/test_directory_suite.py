"""The conformance suite on the directory store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from det_core.storage import DirectoryStore, Store
from support.store_suite import CheckpointStoreSuite


class TestDirectoryStore(CheckpointStoreSuite):
    def make_store(self, folder: Path) -> Store:
        return DirectoryStore(folder, visibility_timeout=0.2)

    def damage(self, store: Store, storage_id: str, path: str, change: Callable[[bytes], bytes] | None) -> None:
        file = Path(store.root, storage_id, path)
        if change is None:
            file.unlink()
        else:
            file.write_bytes(change(file.read_bytes()))

    def beside(self, store: Store, name: str) -> bytes:
        return Path(store.root, name).read_bytes()
