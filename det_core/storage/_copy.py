"""Copy, hash and compare local files with a bounded number of threads."""

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
"""Bytes read at a time; a file that is not larger is small. With twice as many a copy takes twice as long, as the
kernel then looks for larger pages."""
PIECE_CHUNKS = 4
"""Maximum chunks of a :class:`ChunkRange`."""
BATCH_FILES = 64
"""Maximum small files that a thread takes at a time."""
COPY_THREADS = min(8, max(2, len(os.sched_getaffinity(0))))
"""Threads that copy: more than processors only compete for the interpreter's lock."""
SYNC_THREADS = 16
"""Threads that sync. Many: waiting for a disk costs nothing, and the disk merges requests."""
FICLONE = 0x40049409
"""Request of <linux/fs.h>; Python has no name for it before 3.12."""
FILE_COST_BYTES = 64 << 10
"""Cost of opening a file, in bytes that could be copied meanwhile."""
FATAL_ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""Errors of the disk or the file; any other one means that cloning is not supported here."""


class CopyTask(NamedTuple):
    """A file to copy to ``target``, or to hash if that is None."""

    name: str
    """Its path in the checkpoint."""
    source: str
    size: int
    target: str | None = None
    expected: tuple[str, ...] | None = None
    """The digests that it must have."""


class ChunkRange(NamedTuple):
    """Consecutive chunks of a file."""

    task: CopyTask
    first: int
    chunks: int

    def bytes(self, chunk_size: int) -> int:
        """Return the number of its bytes."""
        return min(self.task.size, (self.first + self.chunks) * chunk_size) - self.first * chunk_size


def pieces(tasks: Iterable[CopyTask], chunk_size: int = CHUNK_BYTES, limit: int = PIECE_CHUNKS) -> list[ChunkRange]:
    """Cut files into ranges of at most ``limit`` chunks; an empty file is one range."""
    out: list[ChunkRange] = []
    for task in tasks:
        chunks = -(-task.size // chunk_size)
        out.extend(ChunkRange(task, i, min(limit, chunks - i)) for i in range(0, max(1, chunks), limit))
    return out


def split_work(work: Sequence[ChunkRange], part: int, parts: int, chunk_size: int = CHUNK_BYTES) -> list[ChunkRange]:
    """Return one of ``parts`` shares of ``work``: contiguous, about equal in bytes and in files."""
    weights = [piece.bytes(chunk_size) + BUFFER_BYTES for piece in work]  # opening a file costs about a buffer
    total = sum(weights)
    before = 0
    out = []
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
    """Return the manifest's entry for a file with these bytes."""
    return FileEntry(
        len(data), tuple(digest_of(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
    )


def digests(disk: Disk, listing: Listing, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the digests of some files of a listing, by name."""
    tasks = [CopyTask(name, listing.files[name].path, listing.files[name].size) for name in names]
    return {name: entry.digests or () for name, entry in Copier(disk, "the folder").run(tasks).items()}


class Copier:
    """Copy and hash the files of one checkpoint.

    Args:
        disk: the file system.
        where: name of the checkpoint in messages.
        chunk_size: bytes per digest.
        stored: whether the sources belong to a stored checkpoint, and so are not links and have exactly the given size.
        growing: whether the sources may grow meanwhile, as event files do; their beginning is copied.
        seal: whether to make each target, or each hashed file, durable and read-only.
        progress: receives the number of bytes done.
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
        self._disk = disk
        self._label = where
        self._chunk = chunk_size
        self._stored = stored
        self._growing = growing
        self._seal = seal
        self._flags = os.O_RDONLY | os.O_CLOEXEC
        if stored:  # a stored file may have become a link out of the checkpoint, or a FIFO, which open() would wait for
            self._flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        self._progress = progress

    def run(self, tasks: Sequence[CopyTask]) -> dict[str, FileEntry]:
        """Copy or hash every file, and return their manifest entries by name.

        Raises:
            CheckpointCorrupt: If a file of a stored checkpoint is missing or differs from its digests.
            CheckpointError: If a file changed meanwhile, so that the copy may be a mixture.
            StorageError: If the disk refused.
        """
        digests = self.process([ChunkRange(task, 0, -(-task.size // self._chunk)) for task in tasks])
        return {task.name: FileEntry(task.size, digests[task.name, 0]) for task in tasks}

    def process(self, work: Sequence[ChunkRange]) -> dict[tuple[str, int], tuple[str, ...]]:
        """Copy, hash or compare ranges, and return their digests by name and first chunk. Raises as :meth:`run`."""
        meter = ProgressMeter(self._progress)
        large = [piece for piece in work if piece.task.size > BUFFER_BYTES]
        small = [piece for piece in work if piece.task.size <= BUFFER_BYTES]
        threads = SYNC_THREADS if self._seal else COPY_THREADS
        size = max(1, min(BATCH_FILES, -(-len(small) // threads)))
        digests: dict[tuple[str, int], tuple[str, ...]] = {}

        def batch(some: list[ChunkRange]) -> None:
            # One buffer for all, which stays in the processor's cache: reading, hashing and writing there is as fast as
            # copy_file_range() alone, and faster than that with a second pass to hash (tmpfs, ext4).
            buffer = memoryview(bytearray(min(BUFFER_BYTES, max(piece.task.size for piece in some))))
            for piece in some:
                digests[piece.task.name, piece.first] = self._one(piece, buffer, meter)

        batches = [small[i : i + size] for i in range(0, len(small), size)]
        map_threads(batch, [[piece] for piece in large], min(COPY_THREADS, len(large)), meter)
        map_threads(batch, batches, min(threads, len(batches)), meter)
        return digests

    def _one(self, piece: ChunkRange, buffer: memoryview, meter: ProgressMeter) -> tuple[str, ...]:
        task = piece.task
        do = self._disk.do
        source = self._open(task)
        try:
            status = do("look at", task.source, os.fstat, source)
            self._check(task, status)
            if task.target is None:
                digests = self._chunks(piece, source, None, buffer, meter)
                self._check_unchanged(task, status, source)
                if self._seal:
                    self._disk.make_read_only(task.source, source, stat.S_IMODE(status.st_mode))
                    do("sync", task.source, os.fsync, source)
                return digests
            mode = status.st_mode & 0o777
            if self._seal:
                mode = mode & 0o555 | 0o400
            else:
                mode |= 0o200
            with self._disk.open_fd(task.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as target:
                digests = self._chunks(piece, source, target, buffer, meter)
                self._check_unchanged(task, status, source)
                if self._seal:
                    do("sync", task.target, os.fsync, target)
            return digests
        finally:
            os.close(source)

    def _chunks(
        self, piece: ChunkRange, source: int, target: int | None, buffer: memoryview, meter: ProgressMeter
    ) -> tuple[str, ...]:
        task = piece.task
        digests = []
        for number in range(piece.first, piece.first + piece.chunks):
            start = number * self._chunk
            end = min(task.size, start + self._chunk)
            digest = self._hash()
            offset = start
            while offset < end:
                got = self._disk.do("read", task.source, os.preadv, source, [buffer[: end - offset]], offset)
                if not got:
                    raise changed(task)
                digest.update(buffer[:got])
                if target is not None:
                    self._disk.write_all(target, task.target or "", buffer[:got], offset)
                offset += got
            digests.append(digest.hexdigest())
            if target is not None and self._seal:
                with suppress(OSError):  # advice: the kernel begins to write, and the sync waits less
                    os.posix_fadvise(target, start, end - start, os.POSIX_FADV_DONTNEED)
            if task.expected is not None and task.expected[number] != digests[-1]:
                raise CheckpointCorrupt(
                    f"{self._label}: {task.name} differs from its manifest between byte {start} and {end}"
                )
            meter.add(end - start)
        return tuple(digests)

    def _open(self, task: CopyTask) -> int:
        try:
            return self._disk.do("open", task.source, os.open, task.source, self._flags)
        except StorageError as e:
            if self._stored and e.errno == errno.ELOOP:
                raise CheckpointCorrupt(f"{self._label}: {task.name} is a link") from e
            if self._stored and e.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CheckpointCorrupt(f"{self._label}: {task.name} is missing") from e
            raise

    def _check(self, task: CopyTask, found: os.stat_result) -> None:
        if self._stored:
            check_stored(self._label, task.name, task.size, found)
        elif found.st_size < task.size or (found.st_size > task.size and not self._growing):
            raise changed(task)

    def _check_unchanged(self, task: CopyTask, before: os.stat_result, source: int) -> None:
        if not (self._stored or self._growing):  # a stored file has digests to compare with
            check_unchanged(self._disk, task, before, source)


def check_unchanged(disk: Disk, task: CopyTask, before: os.stat_result, source: int) -> None:
    """Raise CheckpointError if an open file changed since ``before``, or does not have the size that was listed."""
    after = disk.do("look at", task.source, os.fstat, source)
    if after.st_size != task.size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise changed(task)


def changed(task: CopyTask) -> CheckpointError:
    """Return the error of a file that changed while it was read."""
    return CheckpointError(
        f"{task.source} was changed while it was copied: save when nothing writes to it, or exclude it by a selector"
    )


def check_stored(where: str, name: str, size: int, found: os.stat_result) -> None:
    """Raise CheckpointCorrupt unless ``found`` is a regular file of ``size`` bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointCorrupt(f"{where}: {name} is not a regular file")
    if found.st_size != size:
        raise CheckpointCorrupt(f"{where}: {name} has {found.st_size} bytes, its manifest says {size}")


def copy_in(disk: Disk, listing: Listing, folder: str) -> None:
    """Copy files into ``folder``, by reflink if possible, so that nobody else can change their bytes.

    Raises:
        CheckpointError: If a file changed meanwhile.
        StorageError: If the disk refused.
    """
    disk.make_folders(folder, listing.directories)
    tasks = [CopyTask(name, source.path, source.size, f"{folder}/{name}") for name, source in listing.files.items()]
    # The first file shows whether the file system can share blocks.
    if tasks and _clone(disk, tasks[0]):
        tasks = [task for task in tasks[1:] if not _clone(disk, task)]
    Copier(disk, "the folder").run(tasks)


def _clone(disk: Disk, task: CopyTask) -> bool:
    """Return whether ``task.target`` now shares the blocks of the source; if not, it does not exist."""
    import fcntl

    assert task.target is not None
    with disk.open_fd(task.source, os.O_RDONLY) as source:
        before = disk.do("look at", task.source, os.fstat, source)
        try:
            with disk.open_fd(
                task.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, before.st_mode & 0o777 | 0o200
            ) as target:
                disk.do("clone", task.target, fcntl.ioctl, target, FICLONE, source)
            check_unchanged(disk, task, before, source)
            return True
        except StorageError as e:
            disk.remove_file(task.target)
            if e.errno in FATAL_ERRNOS:
                raise
    return False
