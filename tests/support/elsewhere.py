"""A store whose checkpoints have no folder on this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from det_core.storage import DirectoryStore, Manifest, Progress, StoredCheckpoint


class Elsewhere(DirectoryStore):
    """A directory that hides: what it stores must be copied out to be read.

    Attributes:
        fetched: the files that were copied out, in order, with their bytes.
        arriving: called with each of them before it is copied; may raise.
    """

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self.fetched: list[tuple[str, int]] = []
        self.arriving: Callable[[str], object] = lambda name: None

    @property
    def names(self) -> list[str]:
        """The files that were copied out, sorted."""
        return sorted(name for name, _ in self.fetched)

    def open(self, storage_id: str, manifest: Manifest | None = None) -> Any:
        return _Hidden(self, super().open(storage_id, manifest))


class _Hidden:
    """A checkpoint without a path."""

    path = None

    def __init__(self, store: Elsewhere, stored: StoredCheckpoint) -> None:
        self._store = store
        self._stored = stored
        self.storage_id = stored.storage_id
        self.manifest = stored.manifest
        self.metadata = stored.metadata
        self.check = stored.check

    def copy_to(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        self._stored.copy_to(folder, [], directories, progress)
        for name in names:
            self._store.arriving(name)
            self._stored.copy_to(folder, [name], [], progress)
            self._store.fetched.append((name, self.manifest.files[name].size))
