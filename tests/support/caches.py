"""Checkpoints that are restored by way of a cache, and what it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from det_core.core._checkpoint import CheckpointCache
from det_core.storage import Disk
from support.checkpoints import STEPS, Recorder, alone, fill
from support.elsewhere import Elsewhere

FILES = {f"f{i}": os.urandom(100) * 100 for i in range(10)}
SIZE = 10 * 10_000 + len('{\n  "steps_completed": 3\n}')


def store(folder: Path, *names: str) -> list[str]:
    """The ids of checkpoints of ``SIZE`` bytes each, all different."""
    found = []
    for name in names:
        files = {path: name.encode() * 10_000 for path in FILES} if len(name) == 1 else FILES
        with alone() as distributed:
            found.append(Recorder().context(distributed, folder / "store").upload(fill(folder / name, files), STEPS))
    return found


@contextmanager
def restored(folder: Path, storage_id: str, limit: int, disk: Disk | None = None) -> Iterator[tuple[Path, Elsewhere]]:
    """A checkpoint as a job of its own restores it."""
    elsewhere = Elsewhere(folder / "store")
    cache = CheckpointCache(folder / "cache", limit, disk)
    with alone() as distributed:
        context = Recorder().context(distributed, folder / "store", store=elsewhere, cache=cache)
        with context.restore_path(storage_id) as path:
            yield path, elsewhere


def kept(folder: Path) -> set[str]:
    """The ids of what the cache holds."""
    return {p.name for p in (folder / "cache").glob("[!.]*/*-*-*-*-*")}


def entries(folder: Path) -> list[Path]:
    return [p for p in (folder / "cache").glob("*") if p.name != "locks"]
