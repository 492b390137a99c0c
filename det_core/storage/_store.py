"""What a checkpoint store is: the seam between whoever saves and restores, and wherever the bytes lie.

::

    <root>/<storage_id>/…                                 a checkpoint: a directory is renamed to here,
                                                          in an object store its manifest comes last
    <root>/.det_core-tmp/<storage_id>.<owner>             somebody writes or deletes this checkpoint
    <root>/.det_core-tmp/held.<storage_id>.<owner>.<…>    somebody reads it
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
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
"""The globs that delete a whole checkpoint."""
PROBE_PREFIX, TEMP_PREFIX = "probe.", "beside."
"""How other names aside begin."""
_PROBE_TEXT = b"det_core writes this to see whether it can, and removes it\n"


class Store(ABC):
    """Where checkpoints lie, each in one folder named by its storage_id.

    A store promises that a checkpoint is listed when every byte of it is safe, and not before; that what is deleted
    stops being listed first; and that what the dead leave half done is never listed, and is collected. Callers may use
    one store from several threads, and several stores, in several processes and on several hosts, at one place.

    A subclass says how to read, write, remove and list (the methods with an underscore), and how a checkpoint is
    written (:meth:`begin`), read (:meth:`_checkpoint`) and taken apart. ``tests/support`` has the suite that it is to
    pass.

    Attributes:
        root: where it is, as messages name it: without secrets.
        disk: this machine's file system, also for the folders that scripts give.
    """

    root: str
    disk: Disk
    _threads = 1
    """How many small requests are worth having in flight."""

    def __init__(self) -> None:
        self._headers: dict[str, Header] = {}
        self._warned_unverified: set[str] = set()
        """Checkpoints of which was said that they are unverified."""
        self._warned_unlisted: set[str] = set()
        """Checkpoints of which was said that they are not listed."""
        self._abandoned: set[str] = set()
        """Marks of this process that nobody stands behind any more."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    # Writing.

    @abstractmethod
    def begin(self, storage_id: str, owner: Owner) -> Staging:
        """Start a checkpoint; before the first of ``owner``, what its run left behind unfinished is collected.

        Raises:
            StorageError: the store refused, or has a checkpoint of that id, which some only see at the commit.
        """

    @abstractmethod
    def join(self, ticket: str, part: int) -> Staging:
        """The staging of another rank; ``part`` is this rank.

        Raises:
            StorageError: this process does not see what that one made, as on a folder that is not shared.
        """

    @abstractmethod
    def put_file(self, source: Path, name: str) -> None:
        """Copy one local file to ``<root>/<name>``, beside the checkpoints, in place of what is there, in one step.

        Args:
            source: the file.
            name: a relative POSIX path.
        """

    @abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Remove a folder that :meth:`put_file` has filled. One that is not there is no error.

        Args:
            folder: a relative POSIX path.
        """

    # Reading.

    def open(self, storage_id: str, manifest: Manifest | None = None) -> StoredCheckpoint:
        """Look a checkpoint up. One without a manifest, written by others, is accepted, and logged once as unverified.

        Args:
            storage_id: its name.
            manifest: what another rank read, so that this one need not.

        Raises:
            CheckpointNotFound: there is none of that id, or it is being written or deleted.
            CheckpointCorrupt: its manifest cannot be used.
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
        """The complete checkpoints, of one run or of all, oldest to newest within a run.

        One whose manifest is damaged or cannot be read is logged, once, and left out: a store may be shared, and what
        is wrong with one checkpoint concerns nobody who does not read it. Of a manifest that is read for the first time
        it takes the first bytes, of others, whose header never changes, none.
        """
        names = self._names()
        if self._headers:
            for storage_id in self._in_progress().union(self._headers.keys() - set(names)):
                self._headers.pop(storage_id, None)
        found = map_threads(self._header, names, self._threads)
        return sorted(header for header in found if header is not None and run_id in (None, header.run_id))

    def list_again(self, headers: Collection[Header]) -> builtins.list[Header]:
        """Those of ``headers`` that are complete checkpoints still, oldest to newest within a run.

        Each is looked up anew, by one small read. What else the store has is not asked about: with 2,000 checkpoints
        of other runs on a server on loopback, 30 ms for four, where the first :meth:`list` takes 20 s.
        """
        names = [header.storage_id for header in headers]
        for storage_id in names:
            self._headers.pop(storage_id, None)
        return sorted(header for header in map_threads(self._header, names, self._threads) if header is not None)

    @contextmanager
    def read_lease(self, storage_id: str, owner: Owner) -> Iterator[None]:
        """While it lasts, :meth:`in_use` of every process names the checkpoint.

        A store that may not be written to lets the reader through without a mark, and says so in the debug log.
        """
        mark = f"{STAGING_DIR}/{READ_LEASE_PREFIX}{check_storage_id(storage_id)}.{owner.tag}.{os.urandom(6).hex()}"
        try:
            self._write(mark, b"", durable=False)
        except StorageError as e:
            log.debug("checkpoint %s is read without a mark that it is in use: %s", storage_id, e)
            yield
            return
        try:
            yield
        finally:
            try:
                self._remove([mark])
            except StorageError as e:
                log.warning("the mark that checkpoint %s is in use stays, until this process ends: %s", storage_id, e)

    def in_use(self) -> set[str]:
        """The checkpoints that a living process holds.

        A holder on another host, of whom nobody knows whether it lives, counts for 24 hours.
        """
        marks = ((parse_read_lease(name), age) for name, age in self._list_leases().items())
        return {held[0] for held, age in marks if held is not None and held[1].is_valid(age)}

    # Deleting.

    def delete(self, storage_id: str, globs: Sequence[str] = ALL_FILES) -> dict[str, int]:
        """Delete what matches; returns what is left, as resources. One that is not there is no error.

        What is deleted stops being listed first.
        """
        check_storage_id(storage_id)
        if not any(glob in ALL_FILES for glob in globs):
            try:
                checkpoint = self.open(storage_id)
            except CheckpointNotFound:
                return {}
            patterns = [glob_pattern(glob) for glob in globs]
            gone = [p for p in checkpoint.manifest.files if any(pattern.fullmatch(p) for pattern in patterns)]
            if len(gone) < len(checkpoint.manifest.files):
                return checkpoint.remove(gone)
        self._headers.pop(storage_id, None)
        self._delete_whole(storage_id)
        return {}

    def collect(self, owner: Owner | None = None) -> builtins.list[str]:
        """Remove what writers and deleters that are dead left unfinished, and marks of dead readers.

        A writer on another host, of whom nobody knows whether it lives, is taken for dead 24 hours after it last
        touched its mark; should it live, its commit fails.

        Args:
            owner: who collects: earlier restarts of its run count as dead, wherever they ran.

        Returns:
            the storage_ids of what was unfinished.
        """
        useless: builtins.list[str] = []
        living: set[str] = set()
        dead: dict[str, builtins.list[str]] = {}
        for name, age in self._list_leases().items():
            if (held := parse_read_lease(name)) is not None:
                useless += [] if held[1].is_valid(age) else [name]
            elif name.startswith((PROBE_PREFIX, TEMP_PREFIX)):
                useless += [name] if age > LEASE_TTL else []
            elif (parsed := Owner.parse(name)) is not None:
                # What this process began to delete, any of its threads may finish: it is all the same who removes it.
                over = name in self._abandoned or parsed[1] == Owner.current() or not parsed[1].is_valid(age, owner)
                if over:
                    dead.setdefault(parsed[0], []).append(name)
                else:
                    living.add(parsed[0])
        self._remove([f"{STAGING_DIR}/{name}" for name in useless])
        return sorted(i for i, names in dead.items() if i not in living and self._discard(i, names))

    # Whether it works.

    def check_writable(self) -> None:
        """Write, read back, list and delete a probe.

        Raises:
            StorageError: that does not work; one line says what is wrong and what to do.
        """
        name = f"{PROBE_PREFIX}{os.urandom(8).hex()}"
        path = f"{STAGING_DIR}/{name}"
        try:
            self._write(path, _PROBE_TEXT)
            if self._read(path) != _PROBE_TEXT or name not in self._list_leases():
                raise StorageError(5, f"{self._label}: cannot read back {path}: what was just written is not there")
        except BaseException:
            with contextlib.suppress(StorageError):  # what is under way says more
                self._remove([path])
            raise
        self._remove([path])

    def check_reachable(self) -> None:  # noqa: B027
        """See that there is a place for checkpoints at all, without writing; a folder need not be there yet.

        Raises:
            StorageError: it cannot be reached, or its bucket does not exist.
        """

    def limit(self, deadline: Callable[[], float | None]) -> None:  # noqa: B027
        """Let no request to a service last longer than until ``deadline()``, whatever becomes of it.

        Args:
            deadline: gives a moment on the monotonic clock, None while there is no limit; asked again and again.
        """

    def close(self) -> None:  # noqa: B027
        """Give back connections and threads, if there are any. A later call makes new ones."""

    # What a subclass says.

    @abstractmethod
    def _read(self, path: str, start: int = 0, end: int | None = None) -> bytes | None:
        """The bytes of a file below the root from ``start`` to ``end``; None: it is not there.

        A negative ``start`` without an ``end`` means that many of the last bytes.
        """

    @abstractmethod
    def _write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Put a small file in place of one that may be there, in one step. A mark need not be durable."""

    @abstractmethod
    def _remove(self, paths: Collection[str]) -> None:
        """Remove files, and folders (ending in a slash) if they are empty; what is not there is no error."""

    @abstractmethod
    def _names(self) -> builtins.list[str]:
        """The folders in the root that may be checkpoints."""

    @abstractmethod
    def _list_leases(self) -> dict[str, float]:
        """What lies aside: its name, and how many seconds ago it was written or touched."""

    @abstractmethod
    def _contents(self, storage_id: str) -> Manifest | None:
        """What lies in a folder that has no manifest; None: nothing, or it is being written or deleted.

        Raises:
            CheckpointCorrupt: there is what cannot be read as a checkpoint.
        """

    @abstractmethod
    def _checkpoint(self, storage_id: str, manifest: Manifest) -> StoredCheckpoint:
        """The reader of a checkpoint; raises CheckpointNotFound if this process does not see it."""

    @abstractmethod
    def _delete_whole(self, storage_id: str) -> None:
        """Delete a checkpoint, so that it stops being listed first, and whoever collects can finish it."""

    @abstractmethod
    def _discard(self, storage_id: str, marks: Collection[str]) -> bool:
        """Remove what dead writers and deleters left, and then their marks; whether there was something unfinished."""

    # Common.

    @property
    def _label(self) -> str:
        return f"checkpoint store {self.root}"

    def _describe(self, storage_id: str) -> str:
        return f"checkpoint {storage_id} in {self.root}"

    def _beside(self, name: str) -> str:
        if not is_relative_path(name) or name.startswith("."):
            raise ValueError(f"{name!r} is no path below {self.root}")
        return name

    def _in_progress(self) -> set[str]:
        """The checkpoints that somebody writes or deletes."""
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
        """Read no more than the first and the last bytes of a large manifest: a torn one has no end."""
        path = f"{storage_id}/{MANIFEST_PATH}"
        head = self._read(path, 0, HEADER_BYTES)
        if head is None:
            return None
        header = None
        if len(head) == HEADER_BYTES and self._read(path, -len(MANIFEST_END)) == MANIFEST_END:
            header = Header.parse_prefix(head, self._describe(storage_id))
        if header is None:
            manifest = self._manifest(storage_id)
            header = None if manifest is None else manifest.header
        return None if header is None else dataclasses.replace(header, storage_id=storage_id)

    def _manifest(self, storage_id: str) -> Manifest | None:
        data = self._read(f"{storage_id}/{MANIFEST_PATH}")
        if data is None:
            return None
        manifest = Manifest.decode(data, self._describe(storage_id))
        assert manifest.header is not None
        return dataclasses.replace(manifest, header=dataclasses.replace(manifest.header, storage_id=storage_id))

    def _is_committed(self, storage_id: str) -> bool:
        """Whether there is a manifest.

        One that is torn was never committed: its file system writes in place, and the writer died meanwhile.
        """
        try:
            return self._manifest(storage_id) is not None
        except CheckpointCorrupt:
            return False
        except StorageError:
            raise
        except CheckpointError:  # of a newer version
            return True


class StoredCheckpoint(ABC):
    """A checkpoint that can be read.

    Attributes:
        storage_id: its name.
        manifest: what it holds.
        path: the folder it lies in; None: it lies elsewhere, and must be copied out to be read.
    """

    path: Path | None = None

    def __init__(self, store: Store, storage_id: str, manifest: Manifest) -> None:
        self._store, self.storage_id, self.manifest = store, storage_id, manifest
        self._label = store._describe(storage_id)

    def metadata(self) -> dict[str, Any]:
        """What metadata.json holds; empty without one. Raises CheckpointCorrupt if it differs from the manifest.

        Manifests of earlier versions have no digest of their own, so the steps are compared, too.
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
        """Compare files with the manifest: sizes, and digests if asked for. With ``parts``, one split_work of them.

        Raises:
            CheckpointCorrupt: a file is missing or differs.
            CheckpointNotFound: the checkpoint was deleted meanwhile.
        """

    @abstractmethod
    def copy_to(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Copy files into a folder of our own, where they are writable, comparing them with the manifest.

        Raises:
            CheckpointCorrupt: a file is missing or differs.
            CheckpointNotFound: the checkpoint was deleted meanwhile.
        """

    @contextmanager
    def _unless_deleted(self) -> Iterator[None]:
        """Tell what is damaged from what was deleted while it was read, as by retention.

        Raises:
            CheckpointNotFound: If the checkpoint is gone, in place of the damage that was found.
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
        """A block in which a script reads :attr:`path`; at its end the files must be as they were.

        Raises:
            CheckpointCorrupt: at the end of the block: the script wrote into a stored file, which is named.
        """
        return contextlib.nullcontext()

    def remove(self, names: Collection[str]) -> dict[str, int]:
        """Delete files: first from the manifest, then their bytes, then the folders that are empty; what is left."""
        left = self.manifest.without(names)
        if left.header is not None:
            self._store._write(f"{self.storage_id}/{MANIFEST_PATH}", left.encode())
        gone = sorted(set(self.manifest.directories) - set(left.directories), reverse=True)
        self._store._remove([f"{self.storage_id}/{name}" for name in (*names, *gone)])
        self.manifest = left
        return left.resources

    def _jobs(self, names: Collection[str], top: str, target: Path | None = None) -> list[CopyTask]:
        files = self.manifest.files
        return [
            CopyTask(n, f"{top}/{n}", files[n].size, None if target is None else f"{target}/{n}", files[n].digests)
            for n in sorted(names)
        ]
