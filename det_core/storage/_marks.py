"""Marks by which one process tells all others that it reads a checkpoint of a directory store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from det_core import _clock
from det_core.errors import StorageError
from det_core.storage._io import Disk
from det_core.storage._owner import Owner

log = logging.getLogger("det_core.storage")
HELD = "held."
"""How a mark's name begins: ``held.<storage_id>.<owner tag>.<random>``."""
BELIEVED = 24 * 3600.0
"""Seconds for which the mark of a process on another host, of whom nobody knows whether it lives, counts."""


def mark_name(storage_id: str, owner: Owner) -> str:
    """A name for a new mark."""
    return f"{HELD}{storage_id}.{owner.tag}.{os.urandom(6).hex()}"


def held_by(name: str) -> tuple[str, Owner] | None:
    """The checkpoint that a mark of this name holds, and for whom; None: the name is of no mark."""
    return Owner.parse(name[len(HELD) :].rpartition(".")[0]) if name.startswith(HELD) else None


def counts(owner: Owner, age: float) -> bool:
    """Whether a mark of ``owner``, made ``age`` seconds ago, keeps its checkpoint from being deleted."""
    return not owner.is_dead() and (owner.is_here() or age < BELIEVED)


@contextmanager
def marked(storage_id: str, make: Callable[[], object], remove: Callable[[], object]) -> Iterator[None]:
    """Have a mark while the block runs; where none can be made, as with a key that may only read, go on without."""
    try:
        make()
    except StorageError as e:
        log.debug("checkpoint %s is read without a mark that it is in use: %s", storage_id, e)
        yield
        return
    try:
        yield
    finally:
        try:
            remove()
        except StorageError as e:
            log.warning("the mark that checkpoint %s is in use stays, until this process ends: %s", storage_id, e)


class Marks:
    """The marks in a folder of this machine's file system.

    Args:
        disk: the door.
        folder: where marks lie; need not exist before the first.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder

    @contextmanager
    def hold(self, storage_id: str, owner: Owner) -> Iterator[None]:
        """Have a mark while the block runs; where none can be made, go on without."""
        path = f"{self._folder}/{mark_name(storage_id, owner)}"
        make, remove = lambda: self._disk.write_file(path, b"", sync=False), lambda: self._disk.remove_file(path)
        with marked(storage_id, make, remove):
            yield

    def holds(self, entry: os.DirEntry[str]) -> str | None:
        """The checkpoint that an entry of the folder holds; None: it is no mark, or one that counts no more."""
        if (held := held_by(entry.name)) is None:
            return None
        made = self._disk.modified(entry.path)
        return held[0] if made is not None and counts(held[1], _clock.now() - made) else None
