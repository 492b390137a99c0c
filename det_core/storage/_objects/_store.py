"""An object store as a checkpoint store."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StorageError
from det_core.storage._copy import Job
from det_core.storage._directory import DirectoryStore
from det_core.storage._io import Disk
from det_core.storage._manifest import Header, Manifest
from det_core.storage._marks import mark_name, marked
from det_core.storage._names import INNER, MANIFEST, RESERVED, check_storage_id, folders_of, glob_pattern, is_inner_path
from det_core.storage._objects._bucket import KeyMissing
from det_core.storage._objects._door import Door
from det_core.storage._objects._keys import (
    ASIDE,
    PROBE,
    folder_of,
    is_readable,
    mark_body,
    trash_mark,
    writer_mark,
)
from det_core.storage._objects._run import run, spread
from det_core.storage._objects._staging import ObjectStaging
from det_core.storage._objects._stored import ObjectCheckpoint
from det_core.storage._objects._sweep import Sweep, deleted, held_marks, remove_whole, writers
from det_core.storage._objects._upload import upload
from det_core.storage._owner import Owner
from det_core.storage._store import WHOLE

log = logging.getLogger("det_core.storage")
HASTE = 5.0, 20.0
"""Seconds for which :meth:`ObjectStore.validate` tries again, and that it gives a request."""
_PROBE = b"det_core writes this to see whether it can, and removes it\n"


class ObjectStore:
    """Checkpoints as objects below a prefix: ``<root>/<storage_id>/<path>``.

    Each begins with a mark in ``<root>/.det_core-tmp/``, which says whose the objects are, and is there with the put
    of its manifest, which is the last. Nothing is made, read or connected before the first call.

    Args:
        door: to the bucket.
        scratch: a folder of this machine for what scripts write before it is uploaded.
        disk: the door to the file system of this machine.
    """

    def __init__(self, door: Door, scratch: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        self._door = door
        self._scratch = os.path.abspath(os.fspath(scratch))
        self._disk = disk or Disk(door.where)
        self._abandoned: set[str] = set()
        self._deleting: set[str] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ObjectStore({self.root!r})"

    @property
    def root(self) -> str:
        """The URL, without secrets."""
        return self._door.where

    @property
    def door(self) -> Door:
        """The door to the bucket."""
        return self._door

    @property
    def scratch(self) -> Path:
        """Where, on this machine, scripts write what is then uploaded."""
        return Path(self._scratch)

    @property
    def disk(self) -> Disk:
        """The door to the file system of this machine."""
        return self._disk

    def begin(self, storage_id: str, owner: Owner) -> ObjectStaging:
        """Put a mark, after collecting what the run left behind.

        Raises:
            StorageError: another process writes or deletes a checkpoint of that id; or the store refused.
        """
        check_storage_id(storage_id)
        try:
            self.collect(owner)
            DirectoryStore(self._scratch, disk=self._disk).collect(owner)
        except StorageError as e:
            log.warning("what a dead writer left stays: %s", e)
        taken = run(self.root, lambda _: self._begin(storage_id, owner))
        return self._staging(storage_id, f"{storage_id}.{owner.tag}", None, owner, taken)

    async def _begin(self, storage_id: str, owner: Owner) -> bool:
        """Put the mark unless the name is taken; of two that do so at a time, neither goes on."""
        if await self._door.children(folder_of(storage_id)):
            marks = await self._door.list(f"{ASIDE}{storage_id}.")
            if not writers(marks).get(storage_id):
                return True
        mark = writer_mark(storage_id, owner.tag)
        if (other := await self._others(storage_id)) is not None:
            raise self._refused("begin", storage_id, errno.EBUSY, other)
        await self._door.put(mark, mark_body(owner))
        if (other := await self._others(storage_id, mark)) is not None:
            await self._door.delete([mark])
            raise self._refused("begin", storage_id, errno.EBUSY, other)
        return False

    async def _others(self, storage_id: str, mine: str | None = None) -> str | None:
        """What else is done to a checkpoint just now."""
        marks = await self._door.list(ASIDE)
        if any(key != mine for key, _ in writers(marks).get(storage_id, ())):
            return "another process is writing it, or this one is already"
        return "it is being deleted" if storage_id in deleted(marks) else None

    def join(self, ticket: str, part: int) -> ObjectStaging:
        """See that the chief's mark is there."""
        parsed = Owner.parse(ticket)
        assert parsed is not None, f"{ticket} is no ticket"
        storage_id, chief = parsed
        try:
            run(self.root, lambda _: self._door.get(f"{ASIDE}{ticket}"))
        except KeyMissing:
            text = (
                f"this process does not see {ASIDE}{ticket}, which the chief has just put. Do all ranks have the same"
            )
            why = f"{text} checkpoint_storage, endpoint and keys?"
            raise StorageError(errno.ENOENT, f"checkpoint store {self.root}: {why}") from None
        here = dataclasses.replace(Owner.current("", chief.restart), run=chief.run)
        return self._staging(storage_id, ticket, part, here if part else chief, False)

    def _staging(self, storage_id: str, ticket: str, part: int | None, owner: Owner, taken: bool) -> ObjectStaging:
        left = self._abandoned.add
        return ObjectStaging(
            self._door, self._disk, self._scratch, storage_id, ticket, part, owner, left, taken=taken
        )  # fmt: skip

    def open(self, storage_id: str, manifest: Manifest | None = None) -> ObjectCheckpoint:
        """Look a checkpoint up; one that is being written or deleted is not there."""
        check_storage_id(storage_id)
        manifest = manifest or run(self.root, lambda _: self._manifest(storage_id))
        if manifest is None:
            manifest = run(self.root, lambda _: self._foreign(storage_id))
            log.warning("checkpoint %s in %s has no manifest (written by others): unverified", storage_id, self.root)
        return ObjectCheckpoint(self._door, self._disk, storage_id, manifest)

    async def _manifest(self, storage_id: str) -> Manifest | None:
        try:
            data = await self._door.get(folder_of(storage_id) + MANIFEST)
        except KeyMissing:
            return None
        manifest = Manifest.decode(data, f"checkpoint {storage_id} in {self.root}")
        assert manifest.header is not None
        return dataclasses.replace(manifest, header=dataclasses.replace(manifest.header, storage_id=storage_id))

    async def _foreign(self, storage_id: str) -> Manifest:
        folder = folder_of(storage_id)
        found = {entry.key.removeprefix(folder): entry.size for entry in await self._door.list(folder)}
        marks = await self._door.list(ASIDE) if found else []
        if not found or storage_id in writers(marks) or storage_id in deleted(marks):
            raise CheckpointNotFound(f"no checkpoint {storage_id!r} in {self.root}")
        sizes = {path: size for path, size in found.items() if path and path.split("/", 1)[0] != INNER}
        for path in sizes:
            if not is_readable(path):
                where = f"checkpoint {storage_id} in {self.root}"
                raise CheckpointCorrupt(f"{where} cannot be read: {path!r} is no path on a machine")
        directories = {path for path in sizes if path.endswith("/")}
        files = {path: size for path, size in sizes.items() if path not in directories}
        return Manifest.unverified(files, sorted(folders_of([*files, *(d + "x" for d in directories)])))

    def list(self, run_id: str | None = None) -> list[Header]:
        """The complete checkpoints, by run, restart and ordinal; one with a damaged manifest is logged and left out."""
        found: list[Header] = []

        async def look(name: str) -> None:
            try:
                manifest = await self._manifest(name)
            except CheckpointError as e:
                if isinstance(e, StorageError):
                    raise
                log.warning("not listed: %s", e)
                return
            if manifest is not None and manifest.header is not None and run_id in (None, manifest.header.run_id):
                found.append(manifest.header)

        async def look_at_all() -> None:
            children = [name.removesuffix("/") for name in await self._door.children("") if name.endswith("/")]
            names = [name for name in children if not name.startswith(".") and name not in RESERVED]
            await spread(names, look, self._door.concurrency)

        run(self.root, lambda _: look_at_all())
        return sorted(found)

    def newest(self, run_id: str) -> str | None:
        """The storage_id of the newest complete checkpoint of a run."""
        found = self.list(run_id)
        return found[-1].storage_id if found else None

    def delete(self, storage_id: str, globs: Sequence[str] = WHOLE) -> dict[str, int]:
        """Delete a whole checkpoint, its manifest first; or files, after their entries in the manifest."""
        check_storage_id(storage_id)
        if not any(glob in WHOLE for glob in globs):
            try:
                checkpoint = self.open(storage_id)
            except CheckpointNotFound:
                return {}
            patterns = [glob_pattern(glob) for glob in globs]
            gone = [p for p in checkpoint.manifest.files if any(pattern.fullmatch(p) for pattern in patterns)]
            if len(gone) < len(checkpoint.manifest.files):
                return checkpoint.remove(gone)
        with self._lock:
            self._deleting.add(storage_id)
        try:
            run(self.root, lambda _: self._delete(storage_id))
        finally:
            with self._lock:
                self._deleting.discard(storage_id)
        return {}

    async def _delete(self, storage_id: str) -> None:
        found = await self._door.children(folder_of(storage_id))
        if f"{INNER}/" not in found:
            marks = await self._door.list(ASIDE)
            if storage_id in writers(marks) or not (found or storage_id in deleted(marks)):
                return
        await self._door.put(trash_mark(storage_id), mark_body(Owner.current("", 0)))
        await remove_whole(self._door, storage_id)

    def collect(self, owner: Owner | None = None) -> builtins.list[str]:
        """Remove what dead writers, dead readers and deletions that were cut off have left."""
        with self._lock:
            sweep = Sweep(self._door, owner, frozenset(self._abandoned), frozenset(self._deleting))
        return run(self.root, lambda _: sweep.run())

    @contextlib.contextmanager
    def hold(self, storage_id: str, owner: Owner) -> Iterator[None]:
        """Put a mark while the block runs."""
        key = ASIDE + mark_name(check_storage_id(storage_id), owner)
        with marked(
            storage_id,
            lambda: run(self.root, lambda _: self._door.put(key, mark_body(owner))),
            lambda: run(self.root, lambda _: self._door.delete([key])),
        ):
            yield

    def in_use(self) -> set[str]:
        """The checkpoints that a living process holds."""
        return {held.storage_id for held in held_marks(run(self.root, lambda _: self._door.list(ASIDE))) if held.living}

    def put_beside(self, source: Path, name: str) -> None:
        """Put one local file as ``<root>/<name>``."""
        if not is_inner_path(name) or name.startswith("."):
            raise ValueError(f"{name!r} is no path below {self.root}")
        size = self._disk.do("look at", str(source), os.stat, source).st_size
        upload(self._door, self._disk, self.root, [Job(name, os.fspath(source), size, name)])

    def validate(self) -> None:
        """Put a probe, read it back, list it, delete it."""
        door = self._door.hasty(*HASTE)
        key = f"{ASIDE}{PROBE}{os.urandom(8).hex()}"

        async def look() -> tuple[bytes, builtins.list[str]]:
            try:
                return await door.get(key), [entry.key for entry in await door.list(ASIDE)]
            except KeyMissing:
                return b"", []

        async def probe() -> None:
            await door.put(key, _PROBE)
            try:
                found, listed = await look()
            except BaseException:
                with contextlib.suppress(StorageError):  # what is under way says more
                    await door.delete([key])
                raise
            await door.delete([key])
            if found != _PROBE or key not in listed:
                why = "what was just written is not there: is it a store that shows new objects late?"
                raise self._refused("read back", key, errno.EIO, why)

        run(self.root, lambda _: probe())

    def close(self) -> None:
        """Give connections and threads back; a later call makes new ones."""
        try:
            run(self.root, lambda _: self._door.close())
        except StorageError as e:
            log.debug("nothing more to give back: %s", e)

    def _refused(self, operation: str, what: str, number: int, why: str) -> StorageError:
        return StorageError(number, f"checkpoint store {self.root}: cannot {operation} {what}: {why}")
