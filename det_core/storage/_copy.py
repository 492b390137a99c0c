"""Copying, hashing and comparing files of this machine, by a bounded number of threads.

Measured on tmpfs and ext4: reading into a buffer that stays in the processor's cache, hashing it there and writing it
out is as fast as ``copy_file_range`` alone, and faster than that with a second pass to hash. More threads than
processors only fight for the interpreter's lock, unless they wait for a disk.
"""

from __future__ import annotations

import errno
import heapq
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from det_core.errors import CheckpointCorrupt, CheckpointError, StorageError
from det_core.storage._files import Disk
from det_core.storage._manifest import CHUNK_BYTES, FileEntry, digest_of
from det_core.storage._scan import Listing
from det_core.storage._threads import Progress, ProgressMeter, map_threads

BUFFER_BYTES = 128 << 10
"""Bytes read at a time; a file that is not larger is small. With twice as many a copy takes twice as long: the
kernel then looks for larger pages."""
PIECE_CHUNKS = 4
BATCH_FILES = 64
COPY_THREADS = min(8, max(2, len(os.sched_getaffinity(0))))
SYNC_THREADS = 16
"""Many: a thread that waits for a disk costs nothing, and the disk takes many requests as one."""
FICLONE = 0x40049409
"""<linux/fs.h>; Python has no name for it before 3.12."""
FILE_COST_BYTES = 64 << 10
"""Cost of opening a file, in bytes that could be copied meanwhile."""
FATAL_ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""What is wrong with the disk or the file; any other number says that it cannot be done this way."""


class CopyTask(NamedTuple):
    """A file to copy to ``target``, or, without one, to hash."""

    name: str
    """Its path in the checkpoint."""
    source: str
    size: int
    target: str | None = None
    expected: tuple[str, ...] | None = None
    """The digests it must have."""


class ChunkRange(NamedTuple):
    """Some chunks of a file."""

    job: CopyTask
    first: int
    chunks: int

    def bytes(self, chunk_size: int) -> int:
        """How many bytes it has."""
        return min(self.job.size, (self.first + self.chunks) * chunk_size) - self.first * chunk_size


def pieces(jobs: Iterable[CopyTask], chunk_size: int = CHUNK_BYTES, limit: int = PIECE_CHUNKS) -> list[ChunkRange]:
    """Cut files into pieces of at most ``limit`` chunks; an empty file is one piece."""
    out: list[ChunkRange] = []
    for job in jobs:
        chunks = -(-job.size // chunk_size)
        out.extend(ChunkRange(job, i, min(limit, chunks - i)) for i in range(0, max(1, chunks), limit))
    return out


def split_work(work: Sequence[ChunkRange], part: int, parts: int, chunk_size: int = CHUNK_BYTES) -> list[ChunkRange]:
    """The part of ``work`` that falls to one of ``parts`` ranks: contiguous, about equal in bytes and in files."""
    weights = [piece.bytes(chunk_size) + BUFFER_BYTES for piece in work]
    total, before, out = sum(weights), 0, []
    for piece, weight in zip(work, weights, strict=True):
        if (2 * before + weight) * parts // (2 * total) == part:
            out.append(piece)
        before += weight
    return out


def split_files(sizes: Mapping[str, int], ranks: Iterable[int]) -> dict[int, list[str]]:
    """Return the files that each rank copies: about the same number of bytes and of files for all."""
    loads = [(0, rank) for rank in ranks]
    shares: dict[int, list[str]] = {rank: [] for _, rank in loads}
    for path in sorted(sizes, key=lambda p: (-sizes[p], p)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(path)
        heapq.heappush(loads, (load + sizes[path] + FILE_COST_BYTES, rank))
    return shares


def entry_of(data: bytes) -> FileEntry:
    """What the manifest says of a file with these bytes."""
    return FileEntry(
        len(data), tuple(digest_of(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
    )


def digests(disk: Disk, listing: Listing, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The digests of some files of a listing, by name."""
    jobs = [CopyTask(name, listing.files[name].path, listing.files[name].size) for name in names]
    return {name: entry.digests or () for name, entry in Copier(disk, "the folder").run(jobs).items()}


class Copier:
    """Copies and hashes the files of one checkpoint.

    Args:
        disk: the file system.
        where: how messages name the checkpoint.
        chunk_size: bytes per digest.
        stored: the sources are files of a stored checkpoint: no links, and of the very size that is expected.
        growing: the sources may be written to meanwhile, as event files are: what is copied is their beginning.
        seal: make each target, or what is hashed, durable and read-only.
        progress: told of the bytes done.
    """

    def __init__(
        self,
        disk: Disk,
        where: str,
        *,
        chunk_size: int = CHUNK_BYTES,
        stored: bool = False,
        growing: bool = False,
        seal: bool = False,
        progress: Progress | None = None,
    ) -> None:
        from xxhash import xxh3_128

        self._hash = xxh3_128
        self._disk, self._describe, self._chunk, self._stored, self._seal = disk, where, chunk_size, stored, seal
        self._growing = growing
        # A stored file may have become a link out of the checkpoint, or a FIFO, at which an open would hang.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | ((os.O_NOFOLLOW | os.O_NONBLOCK) if stored else 0)
        self._progress = progress

    def run(self, jobs: Sequence[CopyTask]) -> dict[str, FileEntry]:
        """Copy or hash every file; returns what the manifest says of them, by name.

        Raises:
            CheckpointCorrupt: a file of a stored checkpoint is missing or differs from what is expected.
            CheckpointError: a file was changed meanwhile, so that the copy may be a mixture.
            StorageError: the disk refused.
        """
        found = self.process([ChunkRange(job, 0, -(-job.size // self._chunk)) for job in jobs])
        return {job.name: FileEntry(job.size, found[job.name, 0]) for job in jobs}

    def process(self, work: Sequence[ChunkRange]) -> dict[tuple[str, int], tuple[str, ...]]:
        """Copy, hash or compare pieces; returns the digests of each, by name and first chunk. Raises as :meth:`run`."""
        meter = ProgressMeter(self._progress)
        large = [piece for piece in work if piece.job.size > BUFFER_BYTES]
        small = [piece for piece in work if piece.job.size <= BUFFER_BYTES]
        threads = SYNC_THREADS if self._seal else COPY_THREADS
        size = max(1, min(BATCH_FILES, -(-len(small) // threads)))
        found: dict[tuple[str, int], tuple[str, ...]] = {}

        def batch(some: list[ChunkRange]) -> None:
            buffer = memoryview(bytearray(min(BUFFER_BYTES, max(piece.job.size for piece in some))))
            for piece in some:
                found[piece.job.name, piece.first] = self._one(piece, buffer, meter)

        batches = [small[i : i + size] for i in range(0, len(small), size)]
        map_threads(batch, [[piece] for piece in large], min(COPY_THREADS, len(large)), meter)
        map_threads(batch, batches, min(threads, len(batches)), meter)
        return found

    def _one(self, piece: ChunkRange, buffer: memoryview, meter: ProgressMeter) -> tuple[str, ...]:
        job, do = piece.job, self._disk.do
        source = self._open(job)
        try:
            found = do("look at", job.source, os.fstat, source)
            self._check(job, found)
            if job.target is None:
                digests = self._chunks(piece, source, None, buffer, meter)
                self._check_unchanged(job, found, source)
                if self._seal:
                    self._disk.make_read_only(job.source, source, stat.S_IMODE(found.st_mode))
                    do("sync", job.source, os.fsync, source)
                return digests
            mode = found.st_mode & 0o777
            mode = mode & 0o555 | 0o400 if self._seal else mode | 0o200
            with self._disk.open_fd(job.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as target:
                digests = self._chunks(piece, source, target, buffer, meter)
                self._check_unchanged(job, found, source)
                if self._seal:
                    do("sync", job.target, os.fsync, target)
            return digests
        finally:
            os.close(source)

    def _chunks(
        self, piece: ChunkRange, source: int, target: int | None, buffer: memoryview, meter: ProgressMeter
    ) -> tuple[str, ...]:
        job, digests = piece.job, []
        for number in range(piece.first, piece.first + piece.chunks):
            start, end = number * self._chunk, min(job.size, (number + 1) * self._chunk)
            digest, offset = self._hash(), start
            while offset < end:
                got = self._disk.do("read", job.source, os.preadv, source, [buffer[: end - offset]], offset)
                if not got:
                    raise changed(job)
                digest.update(buffer[:got])
                if target is not None:
                    self._disk.write_all(target, job.target or "", buffer[:got], offset)
                offset += got
            digests.append(digest.hexdigest())
            if target is not None and self._seal:
                with suppress(OSError):  # only advice: the kernel begins to write, and the sync waits less
                    os.posix_fadvise(target, start, end - start, os.POSIX_FADV_DONTNEED)
            if job.expected is not None and job.expected[number] != digests[-1]:
                raise CheckpointCorrupt(
                    f"{self._describe}: {job.name} differs from its manifest between byte {start} and {end}"
                )
            meter.add(end - start)
        return tuple(digests)

    def _open(self, job: CopyTask) -> int:
        try:
            return self._disk.do("open", job.source, os.open, job.source, self._flags)
        except StorageError as e:
            if self._stored and e.errno == errno.ELOOP:
                raise CheckpointCorrupt(f"{self._describe}: {job.name} is a link") from e
            if self._stored and e.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CheckpointCorrupt(f"{self._describe}: {job.name} is missing") from e
            raise

    def _check(self, job: CopyTask, found: os.stat_result) -> None:
        if self._stored:
            check_stored(self._describe, job.name, job.size, found)
        elif found.st_size < job.size or (found.st_size > job.size and not self._growing):
            raise changed(job)

    def _check_unchanged(self, job: CopyTask, before: os.stat_result, source: int) -> None:
        if not (self._stored or self._growing):  # a stored file has digests to compare with
            check_unchanged(self._disk, job, before, source)


def check_unchanged(disk: Disk, job: CopyTask, before: os.stat_result, source: int) -> None:
    """Raise CheckpointError if an open file was written to since ``before``, or has not the size that was listed."""
    after = disk.do("look at", job.source, os.fstat, source)
    if after.st_size != job.size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise changed(job)


def changed(job: CopyTask) -> CheckpointError:
    """The error of a file of which only a mixture of states was to be had."""
    return CheckpointError(
        f"{job.source} was changed while it was copied: save when nothing writes to it, or exclude it by a selector"
    )


def check_stored(where: str, name: str, size: int, found: os.stat_result) -> None:
    """Raise CheckpointCorrupt unless ``found`` is a regular file of ``size`` bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointCorrupt(f"{where}: {name} is no regular file")
    if found.st_size != size:
        raise CheckpointCorrupt(f"{where}: {name} has {found.st_size} bytes, its manifest says {size}")


def copy_in(disk: Disk, listing: Listing, folder: str) -> None:
    """Put copies of a foreign folder's files into ``folder``, of which nobody else has a hand on the bytes.

    Where the file system can share the blocks of a file until one of the two is written to, no byte is copied.

    Raises:
        CheckpointError: If a file was changed meanwhile.
        StorageError: If the disk refused.
    """
    disk.make_folders(folder, listing.directories)
    jobs = [CopyTask(name, source.path, source.size, f"{folder}/{name}") for name, source in listing.files.items()]
    if jobs and _clone(disk, jobs[0]):
        jobs = [job for job in jobs[1:] if not _clone(disk, job)]
    Copier(disk, "the folder").run(jobs)


def _clone(disk: Disk, job: CopyTask) -> bool:
    """Whether ``job.target`` came to share the blocks of the source; if not, it is not there."""
    import fcntl

    assert job.target is not None
    with disk.open_fd(job.source, os.O_RDONLY) as source:
        before = disk.do("look at", job.source, os.fstat, source)
        try:
            with disk.open_fd(
                job.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, before.st_mode & 0o777 | 0o200
            ) as target:
                disk.do("clone", job.target, fcntl.ioctl, target, FICLONE, source)
            check_unchanged(disk, job, before, source)
            return True
        except StorageError as e:
            disk.remove_file(job.target)
            if e.errno in FATAL_ERRNOS:
                raise
    return False
