"""Checkpoints on object stores, through any file system of fsspec; the file ``path`` is ``<root>/<storage_id>/<path>``.

The put of its manifest makes a checkpoint visible; it comes last, after a fresh listing that has every file. A process
that puts or deletes objects of an unlisted checkpoint first writes a lease, ``.det_core-tmp/<storage_id>.<owner>``;
:meth:`ObjectStore.collect` removes the objects of expired leases, unless there is a manifest.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from det_core import _clock
from det_core.errors import CheckpointCorrupt, CheckpointError, StorageError
from det_core.storage._copy import ChunkRange, Copier, CopyTask, entry_of, pieces, split_work
from det_core.storage._directory import DirectoryStaging, DirectoryStore
from det_core.storage._drivers import PART_BYTES, Driver
from det_core.storage._files import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest, digest_of, encode_metadata
from det_core.storage._names import (
    MANIFEST_PATH,
    META_DIR,
    METADATA_FILE,
    RESERVED,
    STAGING_DIR,
    check_storage_id,
    is_relative_path,
    parent_folders,
)
from det_core.storage._owner import Owner
from det_core.storage._scan import Listing
from det_core.storage._staging import Staging
from det_core.storage._store import Store, StoredCheckpoint
from det_core.storage._threads import Progress, ProgressMeter, map_threads

Item = TypeVar("Item", CopyTask, ChunkRange)
log = logging.getLogger("det_core.storage")
SMALL_FILE_BYTES = 8 << 20
"""Files that are not larger are transferred by as many threads as the driver allows."""
LARGE_THREADS = 4
"""Threads for larger files. Few, as each has several parts in memory: 387 MB with as many parts as threads."""


class ObjectInfo(NamedTuple):
    """An object in a listing."""

    size: int
    age: float
    """Seconds since it was put; 0 if the service does not tell."""


class ObjectStore(Store):
    """A place in a file system of fsspec. No request is made before the first call.

    Args:
        driver: the file system.
        scratch: local directory for files of the user before they are uploaded.
        disk: the local file system.
    """

    def __init__(self, driver: Driver, scratch: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        super().__init__()
        self.driver = driver
        self.root = driver.url
        self._threads = driver.threads
        self.disk = disk or Disk(self.root)
        self.scratch = DirectoryStore(scratch, disk=self.disk)
        self._writer: Owner | None = None
        """The last owner for whom dead writers' files were collected."""

    def begin(self, storage_id: str, owner: Owner) -> ObjectStaging:
        """Begin a checkpoint; the first request is made by :meth:`ObjectStaging.start`, in the thread that saves."""
        check_storage_id(storage_id)
        if self._writer != owner:
            try:
                self.scratch.collect()
            except StorageError as e:
                log.warning("cannot collect a dead writer's files: %s", e)
        return ObjectStaging(self, f"{storage_id}.{owner.tag}", storage_id, None, owner)

    def join(self, ticket: str, part: int) -> ObjectStaging:
        parsed = Owner.parse(ticket)
        assert parsed is not None, f"invalid ticket {ticket}"
        return ObjectStaging(self, ticket, parsed[0], part, parsed[1])

    def collect_before(self, owner: Owner) -> None:
        """Collect unfinished files before ``owner``'s first checkpoint, and after one that failed."""
        if self._writer == owner and not self._abandoned:
            return
        try:
            self.collect(owner)
            self._writer = owner
        except StorageError as e:
            if self.driver.is_out_of_time:
                raise
            log.warning("cannot collect a dead writer's files: %s", e)

    def put_file(self, source: Path, name: str) -> None:
        size = self.disk.do("look at", str(source), os.stat, source).st_size
        self.upload([CopyTask(name, os.fspath(source), size, self._beside(name))])

    def remove_folder(self, folder: str) -> None:
        self._remove(builtins.list(self.keys(f"{self._beside(folder)}/")))

    def check_writable(self) -> None:
        """Put, read back, list and delete a probe, with few tries, as a person waits."""
        with contextlib.closing(self.driver.with_few_tries()) as with_few_tries:
            with self._translating_errors("reach", ""):
                with_few_tries.check_bucket()
            super(ObjectStore, ObjectStore(with_few_tries, self.scratch.root, disk=self.disk)).check_writable()

    def check_reachable(self) -> None:
        """Check that the bucket exists: in a misspelt one a run that is to be resumed would begin anew."""
        with contextlib.closing(self.driver.with_few_tries()) as with_few_tries, self._translating_errors("reach", ""):
            with_few_tries.check_bucket()

    def limit(self, deadline: Callable[[], float | None]) -> None:
        self.driver.limit(deadline)

    def close(self) -> None:
        self.driver.close()

    def keys(self, prefix: str) -> dict[str, ObjectInfo]:
        """Return every object in a directory.

        Raises:
            StorageError: If the bucket does not exist.
        """
        try:
            with self._translating_errors("list", prefix, absent=True):
                listing = self.driver.find(prefix)
        except FileNotFoundError:
            self._look_for_bucket()
            return {}
        now = _clock.now()
        return {k: ObjectInfo(size, 0.0 if put is None else now - put) for k, (size, put) in listing.items()}

    def upload(self, tasks: Sequence[CopyTask], progress: Progress | None = None) -> dict[str, FileEntry]:
        """Hash and put files, whose targets are keys; return their manifest entries by name.

        Raises:
            CheckpointError: If a file changed meanwhile: it is read twice, and the digests would be of other bytes.
            StorageError: If the service cannot keep a name, before anything is sent, or if it refused.
        """
        for task in tasks:
            if (problem := self.driver.problem_of(task.target or "")) is not None:
                raise self._storage_error("write", task.name, errno.EINVAL, problem)
        entries: dict[str, FileEntry] = {}
        meter = ProgressMeter(progress)
        copier = Copier(self.disk, self._label)

        def put(task: CopyTask) -> None:
            assert task.target is not None
            before = self.disk.do("look at", task.source, os.stat, task.source)
            entries.update(copier.run([task._replace(target=None)]))
            with self._translating_errors("write", task.target):
                reported = self.driver.put_file(task.source, task.target, meter.add)
            meter.add(task.size - reported)
            after = self.disk.do("look at", task.source, os.stat, task.source)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or after.st_size != task.size:
                raise CheckpointError(f"{task.source} was changed while it was read")

        self._run_parallel(put, tasks, meter, lambda task: task.size)
        return entries

    def fetch(self, where: str, work: Sequence[ChunkRange], chunk: int, meter: ProgressMeter) -> None:
        """Fetch chunks of objects, compare them with the manifest, and write those with a target."""
        targets = {piece.task.target: piece.task.size for piece in work if piece.task.target is not None}
        for target, size in targets.items():
            with self.disk.open_fd(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
                self.disk.do("write", target, os.ftruncate, fd, size)

        def get(piece: ChunkRange) -> None:
            task = piece.task
            start = piece.first * chunk
            data = self._chunk(where, piece, start, piece.bytes(chunk))
            if task.target is not None:
                with self.disk.open_fd(task.target, os.O_WRONLY) as fd:
                    self.disk.write_all(fd, task.target, data, start)
            meter.add(len(data))

        self._run_parallel(get, work, meter, lambda piece: piece.task.size)

    def _chunk(self, where: str, piece: ChunkRange, start: int, size: int) -> bytes:
        """Return one chunk. One that differs is fetched once more, as the network may have damaged it."""
        task = piece.task
        for _ in range(2):
            data = self._read(task.source, start, start + size) if size else b""
            if data is None:
                raise CheckpointCorrupt(f"{where}: {task.name} is missing")
            if len(data) == size and (not task.expected or digest_of(data) == task.expected[piece.first]):
                return data
        end = start + size
        raise CheckpointCorrupt(f"{where}: {task.name} differs from its manifest between byte {start} and {end}")

    def _run_parallel(
        self, work: Callable[[Item], None], items: Sequence[Item], meter: ProgressMeter, size: Callable[[Item], int]
    ) -> None:
        """Run ``work`` for all items, few large ones at a time."""
        large = [item for item in items if size(item) > SMALL_FILE_BYTES]
        small = [item for item in items if size(item) <= SMALL_FILE_BYTES]
        map_threads(work, large, min(LARGE_THREADS, self._threads), meter)
        map_threads(work, small, self._threads, meter)

    def _read(self, path: str, start: int = 0, end: int | None = None) -> bytes | None:
        try:
            with self._translating_errors("read", path, absent=True):
                if start == 0 and end is None:  # without a Range header, which an empty object cannot satisfy
                    return self.driver.get(path)
                return self.driver.get(path, start, end)
        except FileNotFoundError:
            return None

    def _write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        with self._translating_errors("write", path):
            self.driver.put_bytes(path, data)

    def _remove(self, paths: Collection[str]) -> None:
        with self._translating_errors("delete", next(iter(paths), "")):
            map_threads(self.driver.remove, self.driver.batches(paths), self._threads)

    def _names(self) -> builtins.list[str]:
        try:
            with self._translating_errors("list", "", absent=True):
                names = self.driver.folders()
        except FileNotFoundError:
            self._look_for_bucket()
            return []
        return [name for name in names if not name.startswith(".") and name not in RESERVED]

    def _list_leases(self) -> dict[str, float]:
        prefix = f"{STAGING_DIR}/"
        return {key.removeprefix(prefix): info.age for key, info in self.keys(prefix).items()}

    def _contents(self, storage_id: str) -> Manifest | None:
        folder = f"{storage_id}/"
        sizes = {key.removeprefix(folder): info.size for key, info in self.keys(folder).items()}
        if not sizes or storage_id in self._in_progress():
            return None
        files = {path: size for path, size in sizes.items() if path and path.split("/", 1)[0] != META_DIR}
        for path in files:
            if not is_relative_path(path.removesuffix("/")):
                raise CheckpointCorrupt(f"{self._describe(storage_id)} cannot be read: {path!r} is not a path")
        folders = sorted(parent_folders(files))  # Determined puts an object for each, whose name ends in a slash
        return Manifest.unverified({p: size for p, size in files.items() if not p.endswith("/")}, folders)

    def _checkpoint(self, storage_id: str, manifest: Manifest) -> ObjectCheckpoint:
        return ObjectCheckpoint(self, storage_id, manifest)

    def _delete_whole(self, storage_id: str) -> None:
        leases = [(Owner.parse(name), age) for name, age in self._list_leases().items() if name not in self._abandoned]
        others = [
            parsed[1]
            for parsed, age in leases
            if parsed and parsed[0] == storage_id and parsed[1] != Owner.current() and parsed[1].is_valid(age)
        ]
        if others and not self._is_committed(storage_id):
            return  # another process is writing or deleting it
        lease = f"{STAGING_DIR}/{storage_id}.{Owner.current().tag}"
        self._write(lease, b"")
        self._remove_objects(storage_id)
        self._remove([lease])

    def _discard(self, storage_id: str, leases: Collection[str]) -> bool:
        unfinished = not self._is_committed(storage_id)
        if unfinished:
            self._remove_objects(storage_id)
        self._remove([f"{STAGING_DIR}/{name}" for name in leases])
        self._abandoned.difference_update(leases)
        return unfinished

    def _remove_objects(self, storage_id: str) -> None:
        """Remove all objects of a checkpoint, the manifest first and alone, so that its error is raised."""
        folder = f"{storage_id}/"
        self._remove([folder + MANIFEST_PATH])
        self._remove(builtins.list(self.keys(folder)))
        with self._translating_errors("delete the parts of", folder):
            self.driver.abort_multipart_uploads(folder)
        if left := self.keys(folder):
            raise self._storage_error("delete", next(iter(left)), errno.EIO, f"{len(left)} objects are left")

    def _look_for_bucket(self) -> None:
        """Check that a directory that does not exist has a bucket at least, which is not misspelt."""
        with self._translating_errors("list", ""):
            self.driver.check_bucket()

    @contextlib.contextmanager
    def _translating_errors(self, operation: str, key: str, *, absent: bool = False) -> Iterator[None]:
        """Raise errors of the block as one line that names store, operation and key.

        Args:
            operation: a verb, such as ``read``.
            key: the key; empty for the bucket.
            absent: whether a FileNotFoundError may be about the key, and is raised as it is; otherwise the bucket is
                missing.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as e:
            if absent and isinstance(e, FileNotFoundError):
                raise
            raise self._storage_error(operation, key, *self.driver.explain_error(e)) from e

    def _storage_error(self, operation: str, key: str, number: int, text: str) -> StorageError:
        return StorageError(number, f"{self._label}: cannot {operation} {key or 'the bucket'}: {text}")


class ObjectStaging(Staging):
    """A checkpoint that is being written: first in a local scratch directory, then as objects without a manifest.

    Args:
        store: the store.
        ticket: name of the chief's lease.
        storage_id: the checkpoint's name.
        part: the rank; None for a single writer.
        owner: the writing process.
    """

    def __init__(self, store: ObjectStore, ticket: str, storage_id: str, part: int | None, owner: Owner) -> None:
        self._store = store
        self.ticket = ticket
        self.storage_id = storage_id
        self._owner = owner
        self._is_started = False
        """Whether a request was made."""
        self._folder = f"{storage_id}/"
        self._lease = f"{STAGING_DIR}/{ticket}"
        self._is_chief = not part
        self._is_open = True
        self._touched = _clock.monotonic()
        self._is_quiet = part is None
        """Whether no other rank and no abandoned request can still put an object."""
        share = "whole" if part is None else part
        name = f"{storage_id}-{share}.{Owner.current('scratch').tag}"
        self._local = DirectoryStaging(store.scratch, name, storage_id, 0)

    @property
    def path(self) -> Path:
        """This rank's scratch directory, created on first use."""
        return self._local.path

    def scan_written(self) -> Listing:
        return self._local.scan_written()

    def start(self) -> None:
        """Write the chief's lease, or check that it is visible, before the first object is put. Starting twice has no
        effect.

        Raises:
            StorageError: If the store refused, has a checkpoint of that ID, or is another one on this process.
        """
        if self._is_started:
            return
        self._is_started = True
        store = self._store
        if not self._is_chief:
            if store._read(self._lease) is None:
                raise StorageError(
                    errno.ENOENT,
                    f"{store._label}: {self._lease}, which the chief has put, is not visible here: pass the same "
                    "checkpoint_storage on all ranks",
                )
            return
        store.collect_before(self._owner)
        if store.keys(self._folder):
            self._is_started = False  # the objects belong to another process: abort() must not remove them
            raise store._storage_error("begin", self.storage_id, errno.EEXIST, "a checkpoint of that ID exists")
        store._write(self._lease, b"")

    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        self.start()
        self._renew_lease()
        tasks = [CopyTask(p, s.path, s.size, self._folder + p) for p, s in listing.files.items()]
        was_quiet = self._is_quiet
        self._is_quiet = False  # if it raises, a request that was abandoned may still be carried out
        entries = self._store.upload(tasks, self._renewing(progress))
        self._is_quiet = was_quiet
        return entries

    def seal(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        return self.put(listing, progress)

    def commit(
        self, files: Mapping[str, FileEntry], directories: Sequence[str], metadata: Mapping[str, Any], header: Header
    ) -> Manifest:
        """Put metadata.json, check that every file exists, and put the manifest, which lists the checkpoint."""
        self.start()
        store = self._store
        text = encode_metadata(metadata)
        manifest = Manifest({**files, METADATA_FILE: entry_of(text)}, tuple(directories), header)
        if store._read(self._lease) is None:
            raise self._lease_lost()
        store._write(self._folder + METADATA_FILE, text)
        if any(entry.size >= 2 * PART_BYTES for entry in files.values()):  # else none was sent in parts
            self._abort_parts()
        self._check_complete(manifest)
        store._write(self._folder + MANIFEST_PATH, manifest.encode())
        self._is_open = False
        for tidy in (self._local.abort, lambda: store._remove([self._lease])):
            try:
                tidy()
            except StorageError as e:
                store._abandoned.add(self.ticket)
                log.warning("checkpoint %s is complete; cannot remove its temporary files: %s", self.storage_id, e)
        return manifest

    def abort(self) -> None:
        """Remove the scratch directory; on the chief also the objects.

        If another rank or an abandoned request may still put objects, the lease stays for the collector.
        """
        if not self._is_open:
            return
        self._is_open = False
        if not self._is_chief or not self._is_started:
            return self._local.abort()
        self._store._abandoned.add(self.ticket)
        self._local.abort()
        if self._store.driver.is_out_of_time:
            return  # the next restart collects by the lease
        self._store._remove_objects(self.storage_id)
        if self._is_quiet:
            self._store._remove([self._lease])
            self._store._abandoned.discard(self.ticket)

    def _check_complete(self, manifest: Manifest) -> None:
        """Raise StorageError unless a fresh listing has every file."""
        store = self._store
        listed = store.keys(self._folder)
        for path, entry in manifest.files.items():
            info = listed.get(self._folder + path)
            if info is None or info.size != entry.size:
                problem = "is missing" if info is None else f"has {info.size} bytes instead of {entry.size}"
                text = f"file {path} {problem}, though it was stored"
                raise store._storage_error("commit", self.storage_id, errno.EIO, text)

    def _abort_parts(self) -> None:
        """Remove the parts of uploads whose begin was not answered; warn if the keys have no permission for that."""
        try:
            with self._store._translating_errors("delete the parts of", self._folder):
                self._store.driver.abort_multipart_uploads(self._folder)
        except StorageError as e:
            log.warning("cannot remove parts of files that were sent twice: %s", e)

    def _touch(self) -> None:
        if self._store._read(self._lease) is None:
            raise self._lease_lost()
        self._store._write(self._lease, b"")


class ObjectCheckpoint(StoredCheckpoint):
    """The objects of one checkpoint, and its manifest. It has no directory: it must be copied to be read."""

    _store: ObjectStore

    def check(
        self,
        names: Collection[str],
        *,
        part: int = 0,
        parts: int = 1,
        digests: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Compare one share of the files with the manifest: sizes by one listing, bytes by fetching them."""
        chunk = self.manifest.chunk_size
        work = split_work(pieces(self._tasks(names, self.storage_id), chunk, 1), part, parts, chunk)
        with self._unless_deleted():
            self._check_sizes({piece.task.name for piece in work})
            if digests and self.manifest.verified:
                self._store.fetch(self._label, work, chunk, ProgressMeter(progress))

    def copy_to(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Fetch files into ``folder``, comparing each chunk with the manifest before it is written."""
        disk = self._store.disk
        tasks = self._tasks(names, self.storage_id, folder)
        chunk = self.manifest.chunk_size
        disk.make_folders(os.fspath(folder), parent_folders(names).union(directories))
        # Asked first: gigabytes would be fetched before the disk is full.
        room = disk.do("look at", str(folder), os.statvfs, folder)
        size = sum(task.size for task in tasks)
        free = room.f_bavail * room.f_frsize
        if size > free:
            cause = OSError(errno.ENOSPC, f"there are {free} bytes left")
            raise disk.error(f"write {size} bytes into", str(folder), cause)
        with self._unless_deleted():
            self._check_sizes(names)
            self._store.fetch(self._label, pieces(tasks, chunk, 1), chunk, ProgressMeter(progress))

    def _check_sizes(self, names: Collection[str]) -> None:
        if not names:
            return
        listed = self._store.keys(f"{self.storage_id}/")
        for name in names:
            info = listed.get(f"{self.storage_id}/{name}")
            size = self.manifest.files[name].size
            if info is None:
                raise CheckpointCorrupt(f"{self._label}: {name} is missing")
            if info.size != size:
                raise CheckpointCorrupt(f"{self._label}: {name} has {info.size} bytes, its manifest says {size}")
