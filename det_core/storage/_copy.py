"""Copying and hashing files, by a bounded number of threads.

Measured on tmpfs and ext4: reading into a buffer that stays in the processor's cache, hashing it there and writing it
out is as fast as ``copy_file_range`` alone, and faster than that with a second pass to hash. A larger buffer is no
faster, and makes the kernel look for larger pages. More threads than processors only fight for the interpreter's
lock, unless they wait for a disk.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from det_core.errors import CheckpointCorrupt, CheckpointError, StorageError
from det_core.storage._io import Disk, start_writing
from det_core.storage._manifest import CHUNK, FileEntry
from det_core.storage._pool import in_threads
from det_core.storage._scan import Listing

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Called in the caller's thread with the number of bytes done since the last call. What it raises stops the work."""

BUFFER = 128 << 10
"""Bytes read at a time; a file that is not larger is small."""
PIECE_CHUNKS = 4
BATCH_FILES = 64
SYNC_THREADS = 16
"""Many: a thread that waits for a disk costs nothing, and the disk takes many requests as one."""
COPY_THREADS = min(8, max(2, len(os.sched_getaffinity(0))))


class Job(NamedTuple):
    """A file to copy to ``target``, or, without one, to hash."""

    name: str
    """Its path in the checkpoint."""
    source: str
    size: int
    target: str | None = None
    mode: int | None = None
    """Permissions of the target; None: those of the source."""
    expected: tuple[str, ...] | None = None
    """The digests it must have."""


class Piece(NamedTuple):
    """Some chunks of a file."""

    job: Job
    first: int
    chunks: int

    def bytes(self, chunk_size: int) -> int:
        """How many bytes it has."""
        return min(self.job.size, (self.first + self.chunks) * chunk_size) - self.first * chunk_size


def pieces(jobs: Iterable[Job], chunk_size: int = CHUNK, limit: int = PIECE_CHUNKS) -> list[Piece]:
    """Cut files into pieces of at most ``limit`` chunks."""
    out: list[Piece] = []
    for job in jobs:
        chunks = -(-job.size // chunk_size)
        out.extend(Piece(job, i, min(limit, chunks - i)) for i in range(0, max(1, chunks), limit))
    return out


def share(work: Sequence[Piece], part: int, parts: int, chunk_size: int = CHUNK) -> list[Piece]:
    """The part of ``work`` that falls to one of ``parts`` ranks: contiguous, about equal in bytes and in files."""
    weights = [piece.bytes(chunk_size) + BUFFER for piece in work]
    total, before, out = sum(weights), 0, []
    for piece, weight in zip(work, weights, strict=True):
        if (2 * before + weight) * parts // (2 * total) == part:
            out.append(piece)
        before += weight
    return out


def digests(disk: Disk, listing: Listing, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The digests of some files of a listing, by name."""
    jobs = [Job(name, listing.files[name].path, listing.files[name].size) for name in names]
    return Copier(disk, "the folder").run(jobs)


def entry_of(data: bytes) -> FileEntry:
    """What the manifest says of a file with these bytes."""
    from xxhash import xxh3_128_hexdigest

    chunks = (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))
    return FileEntry(len(data), tuple(xxh3_128_hexdigest(chunk) for chunk in chunks))


class Copier:
    """Copies and hashes the files of one checkpoint.

    Args:
        disk: the door.
        where: how messages name the checkpoint.
        chunk_size: bytes per digest.
        stored: the sources are files of a stored checkpoint: no links, and of the very size that is expected.
        sync: make each target, or what is hashed, durable.
        progress: told of the bytes done.
    """

    def __init__(
        self,
        disk: Disk,
        where: str,
        *,
        chunk_size: int = CHUNK,
        stored: bool = False,
        sync: bool = False,
        progress: Progress | None = None,
    ) -> None:
        from xxhash import xxh3_128, xxh3_128_hexdigest

        self._hash, self._hexdigest = xxh3_128, xxh3_128_hexdigest
        self._disk, self._where, self._chunk, self._stored, self._sync = disk, where, chunk_size, stored, sync
        self._flags = os.O_RDONLY | os.O_CLOEXEC | ((os.O_NOFOLLOW | os.O_NONBLOCK) if stored else 0)
        self._report = progress
        self._moved: deque[int] = deque()
        self._caller = 0
        self._stopped = False

    def entries(self, jobs: Sequence[Job]) -> dict[str, FileEntry]:
        """Copy or hash every job; returns what the manifest says of them, by name. Raises like :meth:`run`."""
        found = self.run(jobs)
        return {job.name: FileEntry(job.size, found[job.name]) for job in jobs}

    def run(self, jobs: Sequence[Job]) -> dict[str, tuple[str, ...]]:
        """Copy or hash every job; returns the digests by name.

        Raises:
            CheckpointCorrupt: a file of a stored checkpoint is missing or differs from what is expected.
            CheckpointError: a file became shorter meanwhile.
            StorageError: the disk refused.
        """
        self._caller = threading.get_ident()
        small_size = min(BUFFER, self._chunk)
        small = [job for job in jobs if job.size <= small_size]
        large = [job for job in jobs if job.size > small_size]
        found = self._run_large(large)
        found.update(zip((job.name for job in small), self._run_small(small), strict=True))
        return found

    def check(self, work: Sequence[Piece]) -> None:
        """Hash pieces, and compare them with what is expected; raises like :meth:`run`."""
        self._caller = threading.get_ident()
        small_size = min(BUFFER, self._chunk)
        large = [piece for piece in work if piece.job.size > small_size]
        self._spread(self._piece, large, COPY_THREADS)
        self._run_small([piece.job for piece in work if piece.job.size <= small_size])

    def _run_large(self, jobs: list[Job]) -> dict[str, tuple[str, ...]]:
        """A file a thread, as two threads in one file wait for each other; but no thread is to be idle."""
        chunks = max((-(-job.size // self._chunk) for job in jobs), default=0)
        a_file = -(-COPY_THREADS // len(jobs)) if jobs else 1
        work = pieces(jobs, self._chunk, max(PIECE_CHUNKS, -(-chunks // a_file)))
        found: dict[str, tuple[str, ...]] = dict.fromkeys((job.name for job in jobs), ())
        for piece, digests in zip(work, self._spread(self._piece, work, COPY_THREADS), strict=True):
            found[piece.job.name] += digests
        if self._sync and len(work) > len(jobs):
            self._spread(self._sync_file, [job.target or job.source for job in jobs], SYNC_THREADS)
        return found

    def _run_small(self, jobs: list[Job]) -> list[tuple[str, ...]]:
        threads = SYNC_THREADS if self._sync else COPY_THREADS
        size = max(1, min(BATCH_FILES, -(-len(jobs) // threads)))
        batches = [jobs[i : i + size] for i in range(0, len(jobs), size)]
        return [found for batch in self._spread(self._batch, batches, threads) for found in batch]

    def _batch(self, jobs: list[Job]) -> list[tuple[str, ...]]:
        buffer = memoryview(bytearray(max(job.size for job in jobs) or 1))
        found = [self._small(job, buffer[: job.size]) for job in jobs]
        self._moved.append(sum(job.size for job in jobs))
        return found

    def _small(self, job: Job, buffer: memoryview) -> tuple[str, ...]:
        """One file that fits into the buffer. Five thousand of these are a checkpoint: every microsecond counts."""
        do, path, target = self._disk.do, job.source, job.target
        source = self._open(job)
        try:
            found = do("look at", path, os.fstat, source)
            if found.st_size != job.size or not stat.S_ISREG(found.st_mode):
                self._check(job, found)
            got = do("read", path, os.readv, source, [buffer]) if buffer else 0
            if got < job.size:
                self._fill(job, source, buffer, got)
            if target is None and self._sync:
                do("sync", path, os.fsync, source)
        finally:
            os.close(source)
        digests = (self._hexdigest(buffer),) if buffer else ()
        if job.expected is not None and job.expected != digests:
            raise self._differs(job, 0, job.size)
        if target is not None:
            self._write(target, buffer, found.st_mode & 0o777 | 0o200 if job.mode is None else job.mode)
        return digests

    def _write(self, target: str, buffer: memoryview, mode: int) -> None:
        do = self._disk.do
        file = do("open", target, os.open, target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            if buffer and (n := do("write", target, os.pwrite, file, buffer, 0)) < len(buffer):
                self._disk.write_all(file, target, buffer[n:], n)
            if self._sync:
                do("sync", target, os.fsync, file)
        except BaseException:
            os.close(file)
            raise
        do("close", target, os.close, file)

    def _piece(self, piece: Piece) -> tuple[str, ...]:
        job = piece.job
        source = self._open(job)
        try:
            found = self._disk.do("look at", job.source, os.fstat, source)
            self._check(job, found)
            if job.target is None:
                digests = self._chunks(piece, source, None)
                self._sync_whole(piece, source)
                return digests
            mode = found.st_mode & 0o777 | 0o200 if job.mode is None else job.mode
            with self._disk.opened(job.target, os.O_WRONLY | os.O_CREAT, mode) as target:
                digests = self._chunks(piece, source, target)
                self._sync_whole(piece, target)
                return digests
        finally:
            os.close(source)

    def _chunks(self, piece: Piece, source: int, target: int | None) -> tuple[str, ...]:
        job, digests, buffer = piece.job, [], memoryview(bytearray(BUFFER))
        for number in range(piece.first, piece.first + piece.chunks):
            start, end = number * self._chunk, min(job.size, (number + 1) * self._chunk)
            digest = self._hash()
            for offset in range(start, end, BUFFER):
                part = buffer[: min(BUFFER, end - offset)]
                self._fill(job, source, part, 0, offset)
                digest.update(part)
                if target is not None:
                    self._disk.write_all(target, job.target or "", part, offset)
            digests.append(digest.hexdigest())
            if target is not None and self._sync:
                start_writing(target, start, end - start)
            if job.expected is not None and job.expected[number] != digests[-1]:
                raise self._differs(job, start, end)
            self._moved.append(end - start)
            self._look_up()
        return tuple(digests)

    def _fill(self, job: Job, source: int, buffer: memoryview, got: int, offset: int = 0) -> None:
        """Read until the buffer is full."""
        while got < len(buffer):
            n = self._disk.do("read", job.source, os.preadv, source, [buffer[got:]], offset + got)
            if n == 0:
                raise self._shorter(job, offset + got)
            got += n

    def _open(self, job: Job) -> int:
        try:
            return self._disk.do("open", job.source, os.open, job.source, self._flags)
        except StorageError as e:
            if self._stored and e.errno == errno.ELOOP:
                raise CheckpointCorrupt(f"{self._where}: {job.name} is a link") from e
            if self._stored and e.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CheckpointCorrupt(f"{self._where}: {job.name} is missing") from e
            raise

    def _check(self, job: Job, found: os.stat_result) -> None:
        if self._stored:
            check_stored(self._where, job.name, job.size, found)
        elif found.st_size < job.size:
            raise self._shorter(job, found.st_size)

    def _shorter(self, job: Job, size: int) -> CheckpointError:
        return CheckpointError(f"{job.source} became shorter while it was read: {size} bytes instead of {job.size}")

    def _differs(self, job: Job, start: int, end: int) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._where}: {job.name} differs from its manifest between byte {start} and {end}")

    def _sync_whole(self, piece: Piece, file: int) -> None:
        if self._sync and piece.bytes(self._chunk) == piece.job.size:
            self._disk.do("sync", piece.job.target or piece.job.source, os.fsync, file)

    def _sync_file(self, path: str) -> None:
        with self._disk.opened(path, os.O_RDONLY) as fd:
            self._disk.do("sync", path, os.fsync, fd)

    def _spread(self, work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
        """Do work in threads, while the caller's thread tells of progress, by which it may be stopped."""
        return in_threads(work, items, threads, lambda _: self._tell(), tick=self._tell, stop=self._stop)

    def _tell(self) -> None:
        done = 0
        while self._moved:
            done += self._moved.popleft()
        if done and self._report:
            self._report(done)

    def _stop(self) -> None:
        self._stopped = True

    def _look_up(self) -> None:
        """Between two chunks: tell, in the caller's thread; in another, end if that one has stopped."""
        if threading.get_ident() == self._caller:
            self._tell()
        elif self._stopped:
            raise CheckpointError("stopped")


def check_stored(where: str, name: str, size: int, found: os.stat_result) -> None:
    """Raise CheckpointCorrupt unless ``found`` is a regular file of ``size`` bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointCorrupt(f"{where}: {name} is no regular file")
    if found.st_size != size:
        raise CheckpointCorrupt(f"{where}: {name} has {found.st_size} bytes, its manifest says {size}")
