"""Checkpoints on object stores, through any file system of fsspec: ``<root>/<storage_id>/<path>``, an object a file.

A checkpoint is there with the put of its manifest, which comes last, after a fresh listing that shows every file. Who
puts or deletes objects of a checkpoint that is not listed first leaves a mark ``.det_core-tmp/<storage_id>.<owner>``;
:meth:`ObjectStore.collect` removes what marks of the dead point to, unless there is a manifest.
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
LARGE_THREADS = 4
"""Of large files, as each has several parts in memory: 387 MB with as many parts as threads."""


class ObjectInfo(NamedTuple):
    """An object as a listing has it."""

    size: int
    age: float
    """Seconds since it was put; 0 if the service does not say."""


class ObjectStore(Store):
    """A place in a file system of fsspec. Nothing is asked of the service before the first call.

    Args:
        driver: the file system, and how it wants to be used.
        scratch: a folder of this machine for what scripts write before it is uploaded.
        disk: the file system of this machine.
    """

    def __init__(self, driver: Driver, scratch: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        super().__init__()
        self.driver, self.root, self._threads = driver, driver.url, driver.threads
        self.disk = disk or Disk(self.root)
        self.scratch = DirectoryStore(scratch, disk=self.disk)
        self._writer: Owner | None = None
        """Who has collected what others left."""

    def begin(self, storage_id: str, owner: Owner) -> ObjectStaging:
        """Start a checkpoint; the service is first asked by :meth:`ObjectStaging.start`, in the thread that saves."""
        check_storage_id(storage_id)
        if self._writer != owner:
            try:
                self.scratch.collect()
            except StorageError as e:
                log.warning("what a dead writer left stays: %s", e)
        return ObjectStaging(self, f"{storage_id}.{owner.tag}", storage_id, None, owner)

    def join(self, ticket: str, part: int) -> ObjectStaging:
        parsed = Owner.parse(ticket)
        assert parsed is not None, f"{ticket} is no ticket"
        return ObjectStaging(self, ticket, parsed[0], part, parsed[1])

    def collect_before(self, owner: Owner) -> None:
        """Before ``owner``'s first checkpoint, and after one that failed, collect what was left behind."""
        if self._writer == owner and not self._abandoned:
            return
        try:
            self.collect(owner)
            self._writer = owner
        except StorageError as e:
            if self.driver.is_out_of_time:
                raise
            log.warning("what a dead writer left stays: %s", e)

    def put_file(self, source: Path, name: str) -> None:
        size = self.disk.do("look at", str(source), os.stat, source).st_size
        self.upload([CopyTask(name, os.fspath(source), size, self._beside(name))])

    def remove_folder(self, folder: str) -> None:
        self._remove(builtins.list(self.keys(f"{self._beside(folder)}/")))

    def check_writable(self) -> None:
        """Put a probe, read it back, list it, delete it, with little patience: a person waits."""
        with contextlib.closing(self.driver.with_few_tries()) as with_few_tries:
            with self._translating_errors("reach", ""):
                with_few_tries.check_bucket()
            super(ObjectStore, ObjectStore(with_few_tries, self.scratch.root, disk=self.disk)).check_writable()

    def check_reachable(self) -> None:
        """Ask for the bucket: a misspelt one has no checkpoints, and a run that is to be resumed would begin anew."""
        with contextlib.closing(self.driver.with_few_tries()) as with_few_tries, self._translating_errors("reach", ""):
            with_few_tries.check_bucket()

    def limit(self, deadline: Callable[[], float | None]) -> None:
        self.driver.limit(deadline)

    def close(self) -> None:
        self.driver.close()

    # Objects.

    def keys(self, prefix: str) -> dict[str, ObjectInfo]:
        """Every object in a folder; raises StorageError where there is no bucket."""
        try:
            with self._translating_errors("list", prefix, absent=True):
                found = self.driver.find(prefix)
        except FileNotFoundError:
            self._look_for_bucket()
            return {}
        now = _clock.now()
        return {k: ObjectInfo(size, 0.0 if put is None else now - put) for k, (size, put) in found.items()}

    def upload(self, jobs: Sequence[CopyTask], progress: Progress | None = None) -> dict[str, FileEntry]:
        """Hash files and put them, whose targets are keys; returns size and digests by name.

        Raises:
            CheckpointError: a file changed meanwhile: it is read twice, and the digests would be of other bytes.
            StorageError: a name cannot be kept, before anything is sent; or the store refused.
        """
        for job in jobs:
            if (why := self.driver.problem_of(job.target or "")) is not None:
                raise self._storage_error("write", job.name, errno.EINVAL, why)
        entries: dict[str, FileEntry] = {}
        meter, copier = ProgressMeter(progress), Copier(self.disk, self._label)

        def put(job: CopyTask) -> None:
            assert job.target is not None
            before = self.disk.do("look at", job.source, os.stat, job.source)
            entries.update(copier.run([job._replace(target=None)]))
            with self._translating_errors("write", job.target):
                told = self.driver.put_file(job.source, job.target, meter.add)
            meter.add(job.size - told)
            after = self.disk.do("look at", job.source, os.stat, job.source)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or after.st_size != job.size:
                raise CheckpointError(f"{job.source} was changed while it was read")

        self._run_parallel(put, jobs, meter, lambda job: job.size)
        return entries

    def fetch(self, where: str, work: Sequence[ChunkRange], chunk: int, meter: ProgressMeter) -> None:
        """Fetch chunks of objects, compare them, and write those with a target."""
        targets = {piece.job.target: piece.job.size for piece in work if piece.job.target is not None}
        for target, size in targets.items():
            with self.disk.open_fd(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
                self.disk.do("write", target, os.ftruncate, fd, size)

        def get(piece: ChunkRange) -> None:
            job, start = piece.job, piece.first * chunk
            data = self._chunk(where, piece, start, piece.bytes(chunk))
            if job.target is not None:
                with self.disk.open_fd(job.target, os.O_WRONLY) as fd:
                    self.disk.write_all(fd, job.target, data, start)
            meter.add(len(data))

        self._run_parallel(get, work, meter, lambda piece: piece.job.size)

    def _chunk(self, where: str, piece: ChunkRange, start: int, size: int) -> bytes:
        """One chunk; one that differs is fetched once more, as the network may be at fault."""
        job = piece.job
        for _ in range(2):
            data = self._read(job.source, start, start + size) if size else b""
            if data is None:
                raise CheckpointCorrupt(f"{where}: {job.name} is missing")
            if len(data) == size and (not job.expected or digest_of(data) == job.expected[piece.first]):
                return data
        end = start + size
        raise CheckpointCorrupt(f"{where}: {job.name} differs from its manifest between byte {start} and {end}")

    def _run_parallel(
        self, work: Callable[[Item], None], items: Sequence[Item], meter: ProgressMeter, size: Callable[[Item], int]
    ) -> None:
        large = [item for item in items if size(item) > SMALL_FILE_BYTES]
        small = [item for item in items if size(item) <= SMALL_FILE_BYTES]
        map_threads(work, large, min(LARGE_THREADS, self._threads), meter)
        map_threads(work, small, self._threads, meter)

    # What Store asks for.

    def _read(self, path: str, start: int = 0, end: int | None = None) -> bytes | None:
        part = (None, None) if start == 0 and end is None else (start, end)
        try:
            with self._translating_errors("read", path, absent=True):
                return self.driver.get(path, *part)
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
        return {key.removeprefix(f"{STAGING_DIR}/"): found.age for key, found in self.keys(f"{STAGING_DIR}/").items()}

    def _contents(self, storage_id: str) -> Manifest | None:
        folder = f"{storage_id}/"
        sizes = {key.removeprefix(folder): found.size for key, found in self.keys(folder).items()}
        if not sizes or storage_id in self._in_progress():
            return None
        files = {path: size for path, size in sizes.items() if path and path.split("/", 1)[0] != META_DIR}
        for path in files:
            if not is_relative_path(path.removesuffix("/")):
                raise CheckpointCorrupt(f"{self._describe(storage_id)} cannot be read: {path!r} is no path")
        folders = sorted(parent_folders(files))  # Determined puts an object for each, whose name ends in a slash
        return Manifest.unverified({p: size for p, size in files.items() if not p.endswith("/")}, folders)

    def _checkpoint(self, storage_id: str, manifest: Manifest) -> ObjectCheckpoint:
        return ObjectCheckpoint(self, storage_id, manifest)

    def _delete_whole(self, storage_id: str) -> None:
        marks = (
            (name, age, Owner.parse(name)) for name, age in self._list_leases().items() if name not in self._abandoned
        )
        others = [
            name
            for name, age, parsed in marks
            if parsed and parsed[0] == storage_id and parsed[1] != Owner.current() and parsed[1].is_valid(age)
        ]
        if others and not self._is_committed(storage_id):
            return  # somebody is writing or deleting it
        mark = f"{storage_id}.{Owner.current().tag}"
        self._write(f"{STAGING_DIR}/{mark}", b"")
        self._remove_objects(storage_id)
        self._remove([f"{STAGING_DIR}/{mark}"])

    def _discard(self, storage_id: str, marks: Collection[str]) -> bool:
        unfinished = not self._is_committed(storage_id)
        if unfinished:
            self._remove_objects(storage_id)
        self._remove([f"{STAGING_DIR}/{name}" for name in marks])
        self._abandoned.difference_update(marks)
        return unfinished

    def _remove_objects(self, storage_id: str) -> None:
        """Remove what there is of a checkpoint: the manifest first and alone, so that an error of it is told."""
        folder = f"{storage_id}/"
        self._remove([folder + MANIFEST_PATH])
        self._remove(builtins.list(self.keys(folder)))
        with self._translating_errors("delete the parts of", folder):
            self.driver.abort_multipart_uploads(folder)
        if left := self.keys(folder):
            raise self._storage_error("delete", next(iter(left)), errno.EIO, f"{len(left)} objects stay")

    def _look_for_bucket(self) -> None:
        """See that a folder which is not there has a bucket at least; else it is misspelt."""
        with self._translating_errors("list", ""):
            self.driver.check_bucket()

    @contextlib.contextmanager
    def _translating_errors(self, operation: str, key: str, *, absent: bool = False) -> Iterator[None]:
        """Errors of the block as one line that names store, operation and key.

        A FileNotFoundError says that there is no bucket; with ``absent`` it may be the key, and goes through.
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
    """A checkpoint being written: a scratch folder of this machine, then objects that are not listed.

    Args:
        store: where to.
        ticket: the chief's mark.
        storage_id: the checkpoint's name.
        part: the rank; None: there is one writer.
        owner: who writes it.
    """

    def __init__(self, store: ObjectStore, ticket: str, storage_id: str, part: int | None, owner: Owner) -> None:
        self._store, self.ticket, self.storage_id, self._owner = store, ticket, storage_id, owner
        self._started = False
        """Whether the service was asked for anything."""
        self._folder, self._mark = f"{storage_id}/", f"{STAGING_DIR}/{ticket}"
        self._chief, self._open = not part, True
        self._touched = _clock.monotonic()
        self._settled = part is None
        """Whether nobody else puts, and no request was given up that may be carried out yet."""
        name = f"{storage_id}-{'whole' if part is None else part}.{Owner.current('scratch').tag}"
        self._local = DirectoryStaging(store.scratch, name, storage_id, 0)

    @property
    def path(self) -> Path:
        """This rank's scratch folder, made on first use."""
        return self._local.path

    def scan_written(self) -> Listing:
        return self._local.scan_written()

    def start(self) -> None:
        """Leave the chief's mark, or see it: before the first object of the checkpoint is put. Again it does nothing.

        Raises:
            StorageError: the store refused, or has a checkpoint of that id; or this process sees another store.
        """
        if self._started:
            return
        self._started, store = True, self._store
        if not self._chief:
            if store._read(self._mark) is None:
                text = f"this process does not see {self._mark}, which the chief has just put"
                raise StorageError(errno.ENOENT, f"{store._label}: {text}: have all ranks the same checkpoint_storage?")
            return
        store.collect_before(self._owner)
        if store.keys(self._folder):
            self._started = False  # what is there is of somebody else
            raise store._storage_error("begin", self.storage_id, errno.EEXIST, "a checkpoint of that id is there")
        store._write(self._mark, b"")

    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        self.start()
        self._renew_lease()
        jobs = [CopyTask(p, s.path, s.size, self._folder + p) for p, s in listing.files.items()]
        settled, self._settled = self._settled, False
        entries = self._store.upload(jobs, self._renewing(progress))
        self._settled = settled
        return entries

    def seal(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        return self.put(listing, progress)

    def commit(
        self, files: Mapping[str, FileEntry], directories: Sequence[str], metadata: Mapping[str, Any], header: Header
    ) -> Manifest:
        """Put metadata.json, see that every file is there, and put the manifest: from then on it is listed."""
        self.start()
        store, text = self._store, encode_metadata(metadata)
        manifest = Manifest({**files, METADATA_FILE: entry_of(text)}, tuple(directories), header)
        if store._read(self._mark) is None:
            raise self._lease_lost()
        store._write(self._folder + METADATA_FILE, text)
        if any(entry.size >= 2 * PART_BYTES for entry in files.values()):
            self._abort_parts()
        self._check_complete(manifest)
        store._write(self._folder + MANIFEST_PATH, manifest.encode())
        self._open = False
        for tidy in (self._local.abort, lambda: store._remove([self._mark])):
            try:
                tidy()
            except StorageError as e:
                store._abandoned.add(self.ticket)
                log.warning("checkpoint %s is complete, but what served to write it stays: %s", self.storage_id, e)
        return manifest

    def abort(self) -> None:
        """Remove the scratch folder; on the chief also what was put.

        Where more may still be put, by another rank or a request that was given up, the mark stays for the collector.
        """
        if not self._open:
            return
        self._open = False
        if not self._chief or not self._started:
            return self._local.abort()
        self._store._abandoned.add(self.ticket)
        self._local.abort()
        if self._store.driver.is_out_of_time:
            return  # the mark stays, and the next restart collects
        self._store._remove_objects(self.storage_id)
        if self._settled:
            self._store._remove([self._mark])
            self._store._abandoned.discard(self.ticket)

    def _check_complete(self, manifest: Manifest) -> None:
        """See that all of it is there."""
        store = self._store
        listed = store.keys(self._folder)
        for path, entry in manifest.files.items():
            found = listed.get(self._folder + path)
            if found is None or found.size != entry.size:
                what = "is not there any more" if found is None else f"has {found.size} bytes instead of {entry.size}"
                raise store._storage_error(
                    "commit", self.storage_id, errno.EIO, f"file {path} {what}, though it was stored"
                )

    def _abort_parts(self) -> None:
        """Remove the parts of an upload whose begin was carried out unheard, for which keys may lack permission."""
        try:
            with self._store._translating_errors("delete the parts of", self._folder):
                self._store.driver.abort_multipart_uploads(self._folder)
        except StorageError as e:
            log.warning("parts of files that were sent twice may stay: %s", e)

    def _touch(self) -> None:
        if self._store._read(self._mark) is None:
            raise self._lease_lost()
        self._store._write(self._mark, b"")


class ObjectCheckpoint(StoredCheckpoint):
    """The objects of one checkpoint, and what its manifest says of them. Has no folder: it must be copied out."""

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
        """Compare one part of the files with the manifest: sizes by one listing, bytes by fetching them."""
        chunk = self.manifest.chunk_size
        work = split_work(pieces(self._jobs(names, self.storage_id), chunk, 1), part, parts, chunk)
        with self._unless_deleted():
            self._check_sizes({piece.job.name for piece in work})
            if digests and self.manifest.verified:
                self._store.fetch(self._label, work, chunk, ProgressMeter(progress))

    def copy_to(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Fetch files into ``folder``, comparing each chunk with the manifest before it is written."""
        disk, jobs, chunk = self._store.disk, self._jobs(names, self.storage_id, folder), self.manifest.chunk_size
        disk.make_folders(os.fspath(folder), parent_folders(names).union(directories))
        room = disk.do("look at", str(folder), os.statvfs, folder)
        size, free = sum(job.size for job in jobs), room.f_bavail * room.f_frsize
        if size > free:
            left = OSError(errno.ENOSPC, f"there are {free} bytes left")
            raise disk.error(f"write {size} bytes into", str(folder), left)
        with self._unless_deleted():
            self._check_sizes(names)
            self._store.fetch(self._label, pieces(jobs, chunk, 1), chunk, ProgressMeter(progress))

    def _check_sizes(self, names: Collection[str]) -> None:
        if not names:
            return
        listed = self._store.keys(f"{self.storage_id}/")
        for name in names:
            found, size = listed.get(f"{self.storage_id}/{name}"), self.manifest.files[name].size
            if found is None:
                raise CheckpointCorrupt(f"{self._label}: {name} is missing")
            if found.size != size:
                raise CheckpointCorrupt(f"{self._label}: {name} has {found.size} bytes, its manifest says {size}")
