"""Copying and hashing files, in pieces, by a bounded number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from det_core._errors import CheckpointCorrupt, CheckpointError
from det_core.storage._io import Disk
from det_core.storage._manifest import CHUNK, FileEntry
from det_core.storage._pool import in_threads
from det_core.storage._scan import Listing

Progress = Callable[[int], None]
"""Called in the caller's thread with the number of bytes done since the last call."""

BUFFER = 256 << 10
"""Bytes read at a time: they are hashed and written while they are still in the processor's cache."""
PIECE_CHUNKS = 4
BATCH_FILES = 32


@dataclass(frozen=True)
class Job:
    """A file to copy to ``target``, or, without one, to hash."""

    name: str
    """Its path in the checkpoint."""
    source: str
    size: int
    target: str | None = None
    mode: int = 0o666
    expected: tuple[str, ...] | None = None
    """The digests it must have."""
    rename: str | None = None
    """Where ``target`` is moved to when it is complete."""


@dataclass(frozen=True)
class Piece:
    """Some chunks of a file: what one thread does at a time."""

    job: Job
    first: int
    count: int
    whole: bool

    def bytes(self, chunk_size: int) -> int:
        """How many bytes it has."""
        return min(self.job.size, (self.first + self.count) * chunk_size) - self.first * chunk_size


def pieces(jobs: Iterable[Job], chunk_size: int = CHUNK) -> list[Piece]:
    """Cut files into pieces of at most four chunks."""
    out = []
    for job in jobs:
        chunks = -(-job.size // chunk_size)
        if chunks <= PIECE_CHUNKS:
            out.append(Piece(job, 0, chunks, True))
        else:
            starts = range(0, chunks, PIECE_CHUNKS)
            out.extend(Piece(job, i, min(PIECE_CHUNKS, chunks - i), False) for i in starts)
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
    return {name: entry.digests or () for name, entry in Copier(disk, "the folder").run(jobs).items()}


class Copier:
    """Copies and hashes the files of one checkpoint.

    Args:
        disk: the door.
        where: how messages name the checkpoint.
        chunk_size: bytes per digest.
        threads: the largest number of pieces worked on at a time.
        sync: make each target, or what is hashed, durable.
        progress: told of the bytes done.
    """

    def __init__(
        self,
        disk: Disk,
        where: str,
        *,
        chunk_size: int = CHUNK,
        threads: int = 4,
        sync: bool = False,
        progress: Progress | None = None,
    ) -> None:
        from xxhash import xxh3_128

        self._hash = xxh3_128
        self._disk, self._where, self._chunk, self._threads, self._sync = disk, where, chunk_size, threads, sync
        self._progress = progress

    def run(self, jobs: Sequence[Job]) -> dict[str, FileEntry]:
        """Copy or hash every job; the result has size and digests by name.

        Raises:
            CheckpointCorrupt: a file has not the size or the digests expected of it.
            CheckpointError: a file without expected digests became shorter meanwhile.
            StorageError: the disk refused.
        """
        found = dict(self.run_pieces(pieces(jobs, self._chunk)))
        entries = {}
        large = []
        for job in jobs:
            chunks = -(-job.size // self._chunk)
            starts = range(0, chunks, PIECE_CHUNKS) if chunks > PIECE_CHUNKS else (0,)
            entries[job.name] = FileEntry(job.size, tuple(d for i in starts for d in found[job.name, i]))
            if chunks > PIECE_CHUNKS:
                large.append(job)
        in_threads(self._finish, large, self._threads)
        return entries

    def run_pieces(self, work: Sequence[Piece]) -> list[tuple[tuple[str, int], list[str]]]:
        """Copy or hash pieces; returns the digests of each by name and first chunk. Large files are not finished."""
        batches = self._batches(work)
        done = None
        if report := self._progress:

            def done(batch: list[Piece]) -> None:
                report(sum(piece.bytes(self._chunk) for piece in batch))

        return [result for results in in_threads(self._batch, batches, self._threads, done) for result in results]

    def _batches(self, work: Sequence[Piece]) -> list[list[Piece]]:
        """Large pieces alone and first, small ones together: the overhead per task matters for those only."""
        limit = self._chunk
        large = [[p] for p in work if p.bytes(self._chunk) * 4 > limit]
        small = [p for p in work if p.bytes(self._chunk) * 4 <= limit]
        size = max(1, min(BATCH_FILES, len(small) // self._threads))
        return large + [small[i : i + size] for i in range(0, len(small), size)]

    def _batch(self, batch: list[Piece]) -> list[tuple[tuple[str, int], list[str]]]:
        buffer = memoryview(bytearray(min(BUFFER, max(p.bytes(self._chunk) for p in batch) + 1)))
        return [((p.job.name, p.first), self._piece(p, buffer)) for p in batch]

    def _piece(self, piece: Piece, buffer: memoryview) -> list[str]:
        disk, job = self._disk, piece.job
        source = disk.do("open", job.source, os.open, job.source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check_size(job, disk.do("look at", job.source, os.fstat, source).st_size)
            if job.target is None:
                digests = self._chunks(piece, buffer, source, None)
                if piece.whole and self._sync:
                    disk.do("sync", job.source, os.fsync, source)
                return digests
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if piece.whole else 0)
            with disk.opened(job.target, flags, job.mode) as target:
                digests = self._chunks(piece, buffer, source, target)
                if piece.whole and self._sync:
                    disk.do("sync", job.target, os.fsync, target)
        finally:
            os.close(source)
        if piece.whole and job.rename is not None:
            disk.do("rename", job.rename, os.rename, job.target, job.rename)
        return digests

    def _chunks(self, piece: Piece, buffer: memoryview, source: int, target: int | None) -> list[str]:
        disk, job, digests = self._disk, piece.job, []
        for number in range(piece.first, piece.first + piece.count):
            offset, end = number * self._chunk, min(job.size, (number + 1) * self._chunk)
            digest = self._hash()
            while offset < end:
                part = buffer[: end - offset]
                n = disk.do("read", job.source, os.preadv, source, [part], offset)
                if n == 0:
                    self._check_size(job, offset)
                digest.update(part[:n])
                if target is not None:
                    disk.write_all(target, job.target or "", part[:n], offset)
                offset += n
            digests.append(digest.hexdigest())
            if job.expected is not None and job.expected[number] != digests[-1]:
                raise CheckpointCorrupt(
                    f"{self._where}: {job.name} differs from its manifest between byte {number * self._chunk} and {end}"
                )
        return digests

    def _check_size(self, job: Job, size: int) -> None:
        if job.expected is not None and size != job.size:
            raise CheckpointCorrupt(f"{self._where}: {job.name} has {size} bytes, its manifest says {job.size}")
        if size < job.size:
            raise CheckpointError(f"{job.source} became shorter while it was read: {size} bytes instead of {job.size}")

    def _finish(self, job: Job) -> None:
        path = job.target or job.source
        if self._sync:
            with self._disk.opened(path, os.O_RDONLY) as fd:
                self._disk.do("sync", path, os.fsync, fd)
        if job.rename is not None:
            self._disk.do("rename", job.rename, os.rename, job.target, job.rename)
