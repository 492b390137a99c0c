"""What a store finds of those who were at work: marks of writers, readers and deletions; and what goes with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from det_core import _clock
from det_core.errors import CheckpointCorrupt, CheckpointError, StorageError
from det_core.storage._manifest import Manifest
from det_core.storage._marks import BELIEVED, counts, held_by
from det_core.storage._names import MANIFEST
from det_core.storage._objects._bucket import Entry, KeyMissing
from det_core.storage._objects._door import Door
from det_core.storage._objects._keys import ASIDE, PROBE, TRASH, folder_of, owner_in, parse_writer_mark, trash_mark
from det_core.storage._owner import Owner

PATIENCE = 3600.0
"""Seconds after which a deletion that a process of another host began counts as given up."""


class Held(NamedTuple):
    """A reader's mark."""

    key: str
    storage_id: str
    living: bool


def held_marks(marks: Iterable[Entry]) -> list[Held]:
    """The marks of readers."""
    found = []
    for entry in marks:
        held = held_by(entry.key.removeprefix(ASIDE))
        if held is not None:
            found.append(Held(entry.key, held[0], counts(held[1], _clock.now() - entry.modified)))
    return found


def writers(marks: Iterable[Entry]) -> dict[str, list[tuple[str, Owner]]]:
    """The marks of writers, each with its owner, by storage_id."""
    found: dict[str, list[tuple[str, Owner]]] = {}
    for entry in marks:
        if held_by(entry.key.removeprefix(ASIDE)) is None and (mark := parse_writer_mark(entry.key)) is not None:
            found.setdefault(mark.storage_id, []).append((entry.key, mark.owner))
    return found


def deleted(marks: Iterable[Entry]) -> dict[str, Entry]:
    """The marks of deletions, by storage_id."""
    prefix = ASIDE + TRASH
    return {
        entry.key.removeprefix(prefix): entry
        for entry in marks
        if entry.key.startswith(prefix) and parse_writer_mark(entry.key) is None
    }


class Sweep:
    """One look at the marks of a store, and the removal of what the dead have left.

    Args:
        door: to the bucket.
        heir: who collects, see :meth:`Store.collect`.
        abandoned: keys of marks of this very process that nobody stands behind any more.
        deleting: checkpoints that this process is deleting now.
    """

    def __init__(
        self, door: Door, heir: Owner | None, abandoned: Collection[str] = (), deleting: Collection[str] = ()
    ) -> None:
        self._door, self._heir = door, heir
        self._abandoned, self._deleting = abandoned, deleting

    async def run(self) -> list[str]:
        """Do it; returns the storage_ids of unfinished checkpoints that were removed."""
        marks = await self._door.list(ASIDE)
        gone = [held.key for held in held_marks(marks) if not held.living]
        gone += [e.key for e in marks if e.key.startswith(ASIDE + PROBE) and _clock.now() - e.modified > BELIEVED]
        if gone:
            await self._door.delete(gone)
        for storage_id, entry in deleted(marks).items():
            if await self._is_given_up(storage_id, entry):
                await remove_whole(self._door, storage_id)
        collected = []
        for storage_id, owners in writers(marks).items():
            if all(key in self._abandoned or owner.is_dead(self._heir) for key, owner in owners):
                collected += [storage_id] if await self._collect(storage_id) else []
                await self._door.delete([key for key, _ in owners])
        return sorted(collected)

    async def _collect(self, storage_id: str) -> bool:
        """Remove what was not committed; of what was, only the marks are left over."""
        if await self._is_complete(storage_id):
            return False
        folder = folder_of(storage_id)
        await self._door.delete([folder + MANIFEST])
        await self._door.delete([entry.key for entry in await self._door.list(folder)])
        await self._door.abort_stale(folder)
        return True

    async def _is_complete(self, storage_id: str) -> bool:
        """Whether there is a manifest. One that is torn was never put: its service writes in place, and was cut off."""
        try:
            Manifest.decode(await self._door.get(folder_of(storage_id) + MANIFEST), storage_id)
        except (KeyMissing, CheckpointCorrupt):
            return False
        except StorageError:
            raise
        except CheckpointError:  # of a newer version
            return True
        return True

    async def _is_given_up(self, storage_id: str, entry: Entry) -> bool:
        try:
            owner = owner_in(await self._door.get(entry.key))
        except KeyMissing:
            return False
        if owner is None or owner.is_dead():
            return True
        if owner == Owner.current("", 0):
            return storage_id not in self._deleting
        return not owner.is_here() and _clock.now() - entry.modified > PATIENCE


async def remove_whole(door: Door, storage_id: str) -> None:
    """Delete a checkpoint of which a mark says so: the manifest first, the mark last."""
    folder = folder_of(storage_id)
    await door.delete([folder + MANIFEST])
    keys = [entry.key for entry in await door.list(folder)]
    if keys:
        await door.delete(keys)
    await door.abort_stale(folder)
    await door.delete([trash_mark(storage_id)])
