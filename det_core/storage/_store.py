"""The interface of checkpoint stores, between those who save and restore and the place of the bytes.

::

    <root>/<storage_id>/…                                 a checkpoint: a directory is renamed to here,
                                                          in an object store its manifest is put last
    <root>/.det_core-tmp/<storage_id>.<owner>             lease: a process writes or deletes this checkpoint
    <root>/.det_core-tmp/held.<storage_id>.<owner>.<…>    lease: a process reads it
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StorageError
from det_core.storage._copy import CopyTask, entry_of
from det_core.storage._files import Disk
from det_core.storage._manifest import HEADER_BYTES, MANIFEST_END, Header, Manifest, decode_metadata
from det_core.storage._names import (
    MANIFEST_PATH,
    METADATA_FILE,
    STAGING_DIR,
    check_storage_id,
    glob_pattern,
    is_relative_path,
)
from det_core.storage._owner import LEASE_TTL, READ_LEASE_PREFIX, Owner, parse_read_lease
from det_core.storage._staging import Staging
from det_core.storage._threads import Progress, map_threads

log = logging.getLogger("det_core.storage")
ALL_FILES = ("**/*",)
"""Globs that delete a whole checkpoint."""
PROBE_PREFIX = "probe."
"""Prefix of probes in the staging directory."""
TEMP_PREFIX = "beside."
"""Prefix of files in the staging directory that will replace others."""
_PROBE_TEXT = b"det_core writes this to see whether it can, and removes it\n"


class Store(ABC):
    """A place for checkpoints, each in one directory named by its storage ID.

    A store guarantees that a checkpoint is listed once every byte of it is safe, and not before; that a deleted one is
    no longer listed before its bytes are removed; and that unfinished files of dead processes are never listed, and are
    collected. Several threads may share a store; several stores, processes and hosts may share a place.

    A subclass implements reading, writing, removing and listing of files (the methods with an underscore), and how a
    checkpoint is written (:meth:`begin`), read (:meth:`_checkpoint`) and removed. It must pass the suite in
    ``tests/support``.

    Attributes:
        root: the place, as messages show it: without secrets.
        disk: the local file system, also for directories of the user.
    """

    root: str
    disk: Disk
    _threads = 1
    """Number of small requests that are worth having in flight."""

    def __init__(self) -> None:
        self._headers: dict[str, Header] = {}
        self._warned_unverified: set[str] = set()
        self._warned_unlisted: set[str] = set()
        self._abandoned: set[str] = set()
        """Leases of this process whose checkpoints it has abandoned; as it is alive, they would be valid otherwise."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    @abstractmethod
    def begin(self, storage_id: str, owner: Owner) -> Staging:
        """Begin a checkpoint; before the first of ``owner``, collect the unfinished ones of its run.

        Raises:
            StorageError: If the store refused, or has a checkpoint of that ID; some stores detect that at the commit.
        """

    @abstractmethod
    def join(self, ticket: str, part: int) -> Staging:
        """Join a checkpoint that another rank began; ``part`` is this rank.

        Raises:
            StorageError: If this process does not see that rank's files, as in a directory that is not shared.
        """

    @abstractmethod
    def put_file(self, source: Path, name: str) -> None:
        """Copy one local file to ``<root>/<name>``, beside the checkpoints, replacing an existing one in one step.

        Args:
            source: the file.
            name: a relative POSIX path.
        """

    @abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Remove a directory of files of :meth:`put_file`. A missing one is not an error.

        Args:
            folder: a relative POSIX path.
        """

    def open(self, storage_id: str, manifest: Manifest | None = None) -> StoredCheckpoint:
        """Return a checkpoint. One without a manifest, from another program, is logged once as unverified.

        Args:
            storage_id: its name.
            manifest: its manifest, if another rank has read it.

        Raises:
            CheckpointNotFound: If no checkpoint has this ID, or it is being written or deleted.
            CheckpointCorrupt: If its manifest is damaged.
        """
        check_storage_id(storage_id)
        manifest = manifest or self._manifest(storage_id)
        if manifest is None:
            if (manifest := self._contents(storage_id)) is None:
                raise CheckpointNotFound(f"no checkpoint {storage_id!r} in {self.root}")
            if storage_id not in self._warned_unverified:
                self._warned_unverified.add(storage_id)
                log.warning("%s has no manifest (written by others): unverified", self._describe(storage_id))
        return self._checkpoint(storage_id, manifest)

    def list(self, run_id: str | None = None) -> list[Header]:
        """Return the complete checkpoints of one run or of all, oldest to newest within a run.

        One whose manifest is damaged or cannot be read is logged once and left out: a store may be shared, and a faulty
        checkpoint must not affect those who do not read it.
        """
        names = self._names()
        if self._headers:
            # A header never changes, but a deleted checkpoint may be replaced by another one of its ID.
            for storage_id in self._in_progress().union(self._headers.keys() - set(names)):
                self._headers.pop(storage_id, None)
        found = map_threads(self._header, names, self._threads)
        return sorted(header for header in found if header is not None and run_id in (None, header.run_id))

    def list_again(self, headers: Collection[Header]) -> builtins.list[Header]:
        """Return those of ``headers`` that are still complete checkpoints, oldest to newest within a run.

        Each costs one small read, and other checkpoints of the store none: with 2,000 of them on a server on loopback,
        30 ms for four, compared to 20 s of the first :meth:`list`.
        """
        names = [header.storage_id for header in headers]
        for storage_id in names:
            self._headers.pop(storage_id, None)
        return sorted(header for header in map_threads(self._header, names, self._threads) if header is not None)

    @contextmanager
    def read_lease(self, storage_id: str, owner: Owner) -> Iterator[None]:
        """Let :meth:`in_use` of every process include the checkpoint during the block.

        In a store that cannot be written the checkpoint is read without a lease, which the debug log records.
        """
        name = f"{READ_LEASE_PREFIX}{check_storage_id(storage_id)}.{owner.tag}.{os.urandom(6).hex()}"
        lease = f"{STAGING_DIR}/{name}"
        try:
            self._write(lease, b"", durable=False)
        except StorageError as e:
            log.debug("reading checkpoint %s without a lease: %s", storage_id, e)
            yield
            return
        try:
            yield
        finally:
            try:
                self._remove([lease])
            except StorageError as e:
                log.warning("checkpoint %s counts as in use until this process ends: %s", storage_id, e)

    def in_use(self) -> set[str]:
        """Return the checkpoints that live processes read.

        A lease of another host, whose processes cannot be checked, is valid for 24 hours.
        """
        leases = [(parse_read_lease(name), age) for name, age in self._list_leases().items()]
        return {lease[0] for lease, age in leases if lease is not None and lease[1].is_valid(age)}

    def delete(self, storage_id: str, globs: Sequence[str] = ALL_FILES) -> dict[str, int]:
        """Delete the files that match, and return the rest as resources. A missing checkpoint is not an error.

        They are no longer listed before their bytes are removed.
        """
        check_storage_id(storage_id)
        if not any(glob in ALL_FILES for glob in globs):
            try:
                checkpoint = self.open(storage_id)
            except CheckpointNotFound:
                return {}
            patterns = [glob_pattern(glob) for glob in globs]
            matching = [p for p in checkpoint.manifest.files if any(pattern.fullmatch(p) for pattern in patterns)]
            if len(matching) < len(checkpoint.manifest.files):
                return checkpoint.remove(matching)
        self._headers.pop(storage_id, None)
        self._delete_whole(storage_id)
        return {}

    def collect(self, owner: Owner | None = None) -> builtins.list[str]:
        """Remove unfinished files of dead writers and deleters, and leases of dead readers.

        A writer on another host, which cannot be checked, counts as dead 24 hours after it last renewed its lease; if
        it lives, its commit fails.

        Args:
            owner: the collecting process; earlier restarts of its run count as dead on any host.

        Returns:
            The storage IDs of the unfinished checkpoints.
        """
        expired: builtins.list[str] = []
        live: set[str] = set()
        dead: dict[str, builtins.list[str]] = {}
        for name, age in self._list_leases().items():
            if (lease := parse_read_lease(name)) is not None:
                if not lease[1].is_valid(age):
                    expired.append(name)
            elif name.startswith((PROBE_PREFIX, TEMP_PREFIX)):
                if age > LEASE_TTL:
                    expired.append(name)
            elif (parsed := Owner.parse(name)) is not None:
                storage_id, holder = parsed
                # Owner.current() has no run: it deletes. Any thread of this process may finish that.
                is_own_deletion = holder == Owner.current()
                if name in self._abandoned or is_own_deletion or not holder.is_valid(age, owner):
                    dead.setdefault(storage_id, []).append(name)
                else:
                    live.add(storage_id)
        self._remove([f"{STAGING_DIR}/{name}" for name in expired])
        return sorted(i for i, names in dead.items() if i not in live and self._discard(i, names))

    def check_writable(self) -> None:
        """Write, read back, list and delete a probe.

        Raises:
            StorageError: If a step fails; the message has cause and remedy.
        """
        name = f"{PROBE_PREFIX}{os.urandom(8).hex()}"
        path = f"{STAGING_DIR}/{name}"
        try:
            self._write(path, _PROBE_TEXT)
            if self._read(path) != _PROBE_TEXT or name not in self._list_leases():
                text = f"{self._label}: cannot read back {path}: it is not there after it was written"
                raise StorageError(errno.EIO, text)
        except BaseException:
            with contextlib.suppress(StorageError):  # the first error says more
                self._remove([path])
            raise
        self._remove([path])

    def check_reachable(self) -> None:  # noqa: B027
        """Check that the place can be reached, without writing; a directory need not exist yet.

        Raises:
            StorageError: If it cannot be reached, or its bucket does not exist.
        """

    def limit(self, deadline: Callable[[], float | None]) -> None:  # noqa: B027
        """Let no request to a service last beyond ``deadline()``, at the cost of its failure.

        Args:
            deadline: returns a moment on the monotonic clock, or None without a limit; called repeatedly.
        """

    def close(self) -> None:  # noqa: B027
        """Close connections and threads. A later call opens new ones."""

    # For subclasses to implement.

    @abstractmethod
    def _read(self, path: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Return the bytes of a file below the root from ``start`` to ``end``, or None if it does not exist.

        A negative ``start`` without an ``end`` stands for that many of the last bytes.
        """

    @abstractmethod
    def _write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Write a small file in one step, replacing an existing one. A lease need not be durable."""

    @abstractmethod
    def _remove(self, paths: Collection[str]) -> None:
        """Remove files, and directories (ending in a slash) if they are empty; missing ones are not an error."""

    @abstractmethod
    def _names(self) -> builtins.list[str]:
        """Return the directories in the root that may be checkpoints."""

    @abstractmethod
    def _list_leases(self) -> dict[str, float]:
        """Return the names in the staging directory with the seconds since each was written or renewed."""

    @abstractmethod
    def _contents(self, storage_id: str) -> Manifest | None:
        """Return a manifest for a directory without one, or None if it does not exist, or is being written or deleted.

        Raises:
            CheckpointCorrupt: If its content cannot be that of a checkpoint.
        """

    @abstractmethod
    def _checkpoint(self, storage_id: str, manifest: Manifest) -> StoredCheckpoint:
        """Return the reader of a checkpoint.

        Raises:
            CheckpointNotFound: If this process does not see it.
        """

    @abstractmethod
    def _delete_whole(self, storage_id: str) -> None:
        """Delete a checkpoint: unlist it first, and leave a lease by which it is collected if this process dies."""

    @abstractmethod
    def _discard(self, storage_id: str, leases: Collection[str]) -> bool:
        """Remove the files of dead writers and deleters, then their leases; return whether any were unfinished."""

    @property
    def _label(self) -> str:
        return f"checkpoint store {self.root}"

    def _describe(self, storage_id: str) -> str:
        return f"checkpoint {storage_id} in {self.root}"

    def _beside(self, name: str) -> str:
        if not is_relative_path(name) or name.startswith("."):
            raise ValueError(f"{name!r} is not a path below {self.root}")
        return name

    def _in_progress(self) -> set[str]:
        """Return the checkpoints that a process writes or deletes."""
        names = [name for name in self._list_leases() if parse_read_lease(name) is None]
        return {parsed[0] for name in names if (parsed := Owner.parse(name)) is not None}

    def _header(self, storage_id: str) -> Header | None:
        if (known := self._headers.get(storage_id)) is not None:
            return known
        try:
            found = self._read_header(storage_id)
        except CheckpointError as e:
            if storage_id not in self._warned_unlisted:
                self._warned_unlisted.add(storage_id)
                log.warning("not listed: %s", e.args[-1])
            return None
        if found is not None:
            self._headers[storage_id] = found
        return found

    def _read_header(self, storage_id: str) -> Header | None:
        """Return the header of a checkpoint, or None if it has none."""
        # A manifest of many files is large: its first bytes have the header, its last ones show that it is not torn.
        path = f"{storage_id}/{MANIFEST_PATH}"
        head = self._read(path, 0, HEADER_BYTES)
        if head is None:
            return None
        header = None
        if len(head) == HEADER_BYTES and self._read(path, -len(MANIFEST_END)) == MANIFEST_END:
            header = Header.parse_prefix(head, self._describe(storage_id))
        if header is None:
            manifest = self._manifest(storage_id)
            if manifest is None or manifest.header is None:
                return None
            header = manifest.header
        return dataclasses.replace(header, storage_id=storage_id)  # a copied checkpoint has another name

    def _manifest(self, storage_id: str) -> Manifest | None:
        data = self._read(f"{storage_id}/{MANIFEST_PATH}")
        if data is None:
            return None
        manifest = Manifest.decode(data, self._describe(storage_id))
        assert manifest.header is not None
        return dataclasses.replace(manifest, header=dataclasses.replace(manifest.header, storage_id=storage_id))

    def _is_committed(self, storage_id: str) -> bool:
        """Return whether the checkpoint has a manifest. A torn one does not count."""
        try:
            return self._manifest(storage_id) is not None
        except CheckpointCorrupt:  # torn: its file system writes in place, and the writer died meanwhile
            return False
        except StorageError:
            raise
        except CheckpointError:  # of a newer version
            return True


class StoredCheckpoint(ABC):
    """A checkpoint that can be read.

    Attributes:
        storage_id: its name.
        manifest: its content.
        path: its directory; None if it must be copied to be read.
    """

    path: Path | None = None

    def __init__(self, store: Store, storage_id: str, manifest: Manifest) -> None:
        self._store = store
        self.storage_id = storage_id
        self.manifest = manifest
        self._label = store._describe(storage_id)

    def metadata(self) -> dict[str, Any]:
        """Return the content of metadata.json, empty if there is none.

        Raises:
            CheckpointCorrupt: If it differs from the manifest.
        """
        entry = self.manifest.files.get(METADATA_FILE)
        if entry is None:
            return {}
        data = self._store._read(f"{self.storage_id}/{METADATA_FILE}")
        with self._unless_deleted():
            if data is None or (self.manifest.verified and entry_of(data) != entry):
                raise CheckpointCorrupt(f"{self._label}: {METADATA_FILE} is missing or differs from its manifest")
            metadata = decode_metadata(data, self._label)
            header = self.manifest.header
            # Manifests of earlier versions have no digest of their own: the steps show damage there.
            steps = metadata.get("steps_completed")
            if header is not None and steps is not None and steps != header.steps_completed:
                raise CheckpointCorrupt(
                    f"{self._label}: its manifest says steps_completed {header.steps_completed}, and {METADATA_FILE} "
                    f"says {steps}"
                )
        return metadata

    @abstractmethod
    def check(
        self,
        names: Collection[str],
        *,
        part: int = 0,
        parts: int = 1,
        digests: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Compare files with the manifest: sizes, and digests if requested. With ``parts``, only the share number
        ``part``.

        Raises:
            CheckpointCorrupt: If a file is missing or differs.
            CheckpointNotFound: If the checkpoint was deleted meanwhile.
        """

    @abstractmethod
    def copy_to(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Copy files into a private directory, where they are writable, comparing them with the manifest.

        Raises:
            CheckpointCorrupt: If a file is missing or differs.
            CheckpointNotFound: If the checkpoint was deleted meanwhile.
        """

    @contextmanager
    def _unless_deleted(self) -> Iterator[None]:
        """Distinguish damage from a deletion during the block, such as by retention.

        Raises:
            CheckpointNotFound: If the checkpoint was deleted, in place of the damage that was found.
        """
        try:
            yield
        except CheckpointCorrupt as e:
            try:
                self._store.open(self.storage_id)
            except CheckpointNotFound:
                raise CheckpointNotFound(f"{self._label} was deleted while it was read") from e
            except CheckpointError:
                pass  # the first error says more
            raise

    def check_unchanged(self) -> AbstractContextManager[None]:
        """Check at the end of the block, in which a script reads :attr:`path`, that its files are as they were.

        Raises:
            CheckpointCorrupt: If the script wrote into a stored file, which the message names.
        """
        return contextlib.nullcontext()

    def remove(self, names: Collection[str]) -> dict[str, int]:
        """Delete files, and return the rest as resources."""
        left = self.manifest.without(names)
        # First from the manifest: one that has files that are gone would be damaged.
        if left.header is not None:
            self._store._write(f"{self.storage_id}/{MANIFEST_PATH}", left.encode())
        directories = sorted(set(self.manifest.directories) - set(left.directories), reverse=True)
        self._store._remove([f"{self.storage_id}/{name}" for name in (*names, *directories)])
        self.manifest = left
        return left.resources

    def _tasks(self, names: Collection[str], top: str, target: Path | None = None) -> list[CopyTask]:
        files = self.manifest.files
        return [
            CopyTask(n, f"{top}/{n}", files[n].size, None if target is None else f"{target}/{n}", files[n].digests)
            for n in sorted(names)
        ]
