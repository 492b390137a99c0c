"""A store whose checkpoints have no folder on this machine, and a process that restores from it.

``python -m support.elsewhere ROOT CACHE LIMIT STORAGE_ID [HOLD]`` prints ``locks`` when it takes a lock or waits for
it, ``fetching`` when a file has come, does no more when HOLD have, prints ``open`` in the block, and leaves it when a
line comes on its standard input.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from det_core.core._checkpoint import CheckpointCache
from det_core.storage import DirectoryStore, Disk, Manifest, Progress, StoredCheckpoint
from support.checkpoints import Recorder, alone, tree


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

    def copy_out(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        for name in names:
            self._store.arriving(name)
            self._stored.copy_out(folder, [name], directories, progress)
            self._store.fetched.append((name, self.manifest.files[name].size))


class Telling(Disk):
    """Says when a lock is about to be taken."""

    def do(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation == "lock":
            print("locks", path, flush=True)
        return super().do(operation, path, function, *args)


def main(root: str, cache: str, limit: str, storage_id: str, hold: str = "0") -> None:
    store = Elsewhere(Path(root))

    def arriving(name: str) -> None:
        if store.fetched:
            print("fetching", flush=True)
            if len(store.fetched) == int(hold):
                signal.pause()

    store.arriving = arriving
    with alone() as distributed:
        kept = CheckpointCache(Path(cache), int(limit), Telling("the cache"))
        context = Recorder().context(distributed, Path(root), store=store, cache=kept)
        with context.restore_path(storage_id) as path:
            print("files", len(tree(path)), "fetched", sum(size for _, size in store.fetched), flush=True)
            print("open", flush=True)
            sys.stdin.readline()
    print("closed", flush=True)
    assert threading.active_count() == 1, threading.enumerate()


if __name__ == "__main__":
    os.umask(0o077)
    main(*sys.argv[1:])
