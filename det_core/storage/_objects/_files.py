"""The local half of a transfer: files of this machine to bytes with digests, and back. Runs in threads."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NamedTuple

from det_core.errors import CheckpointCorrupt, CheckpointError
from det_core.storage._copy import Job
from det_core.storage._io import Disk

BATCH_FILES = 16
"""Small files that one thread takes at a time."""
SMALL = 256 << 10
"""Bytes of a file that counts as small."""


class Bytes(NamedTuple):
    """A part of a file that was read, with the digest of each chunk."""

    data: bytes
    digests: tuple[str, ...]


class Files:
    """Reads and writes files of this machine.

    Args:
        disk: the door.
        where: how messages name the checkpoint.
        chunk_size: bytes per digest.
    """

    def __init__(self, disk: Disk, where: str, chunk_size: int) -> None:
        from xxhash import xxh3_128, xxh3_128_hexdigest

        self.hash = xxh3_128
        self._hexdigest = xxh3_128_hexdigest
        self._do, self._error = disk.do, disk.error
        self._where = where
        self._chunk = chunk_size

    def read(self, job: Job, start: int, end: int) -> Bytes:
        """Bytes ``start`` (a chunk's first) to ``end`` of a file."""
        do, path = self._do, job.source
        file = do("open", path, os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = do("read", path, os.pread, file, end - start, start)
            while len(data) < end - start:
                more = do("read", path, os.pread, file, end - start - len(data), start + len(data))
                if not more:
                    found = start + len(data)
                    text = f"{path} became shorter while it was read: {found} bytes instead of {job.size}"
                    raise CheckpointError(text)
                data += more
        finally:
            os.close(file)
        return Bytes(data, self.digests(data))

    def read_whole(self, jobs: Sequence[Job]) -> list[Bytes]:
        """Several small files."""
        return [self.read(job, 0, job.size) for job in jobs]

    def digests(self, data: bytes) -> tuple[str, ...]:
        """The digest of each chunk of bytes that begin with one."""
        if len(data) <= self._chunk:
            return (self._hexdigest(data),) if data else ()
        view = memoryview(data)
        return tuple(self._hexdigest(view[i : i + self._chunk]) for i in range(0, len(data), self._chunk))

    def reserve(self, jobs: Sequence[Job]) -> None:
        """Make files at their full size, after a look at the room for all of them.

        Blocks are not allocated: that costs as much as writing them (measured on tmpfs and ext4).

        Raises:
            StorageError: there is no room.
        """
        if not jobs:
            return
        folder = os.path.dirname(jobs[0].target or "")
        room, needed = self._do("look at", folder, os.statvfs, folder), sum(job.size for job in jobs)
        if room.f_blocks and room.f_bavail * room.f_frsize < needed:
            text = f"there are {room.f_bavail * room.f_frsize} bytes left"
            raise self._error(f"write {needed} bytes into", folder, OSError(errno.ENOSPC, text))
        for job in jobs:
            file = self._create(job.target or "")
            try:
                self._do("extend", job.target or "", os.ftruncate, file, job.size)
            finally:
                os.close(file)

    def keep(self, job: Job, data: bytes, first: int, size: int) -> None:
        """:meth:`check` bytes, and :meth:`write` them if the file is wanted."""
        self.check(job, data, first, size)
        self.write(job, data, first * self._chunk)

    def write(self, job: Job, data: bytes, start: int) -> None:
        """Write a part of a file that was reserved; nothing if it is not wanted."""
        if job.target is None:
            return
        file = self._do("open", job.target, os.open, job.target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._write(file, job.target, data, start)
        finally:
            os.close(file)

    def write_whole(self, files: Sequence[tuple[Job, bytes]]) -> None:
        """Several small files."""
        for job, data in files:
            if job.target is not None:
                file = self._create(job.target)
                try:
                    self._write(file, job.target, data, 0)
                finally:
                    os.close(file)

    def check(self, job: Job, data: bytes, first: int, size: int) -> None:
        """Compare bytes that begin with chunk number ``first`` with what is expected of the file.

        Raises:
            CheckpointCorrupt: they differ, or are not ``size`` bytes.
        """
        start = first * self._chunk
        if len(data) != size:
            raise self.other_size(job, start + len(data), more=len(data) > size)
        if job.expected is None:
            return
        for number, digest in enumerate(self.digests(data), first):
            if digest != job.expected[number]:
                raise self.differs(job, number)

    def other_size(self, job: Job, found: int, *, more: bool) -> CheckpointCorrupt:
        """The error for a file that is longer or shorter than its manifest says."""
        size = f"{found} bytes or more" if more and found > job.size else f"{found} bytes"
        return CheckpointCorrupt(f"{self._where}: {job.name} has {size}, its manifest says {job.size}")

    def differs(self, job: Job, number: int) -> CheckpointCorrupt:
        """The error for a chunk with other bytes."""
        start, end = number * self._chunk, min(job.size, (number + 1) * self._chunk)
        return CheckpointCorrupt(f"{self._where}: {job.name} differs from its manifest between byte {start} and {end}")

    def missing(self, job: Job) -> CheckpointCorrupt:
        """The error for a file that is not there."""
        return CheckpointCorrupt(f"{self._where}: {job.name} is missing")

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return self._do("open", path, os.open, path, flags, 0o666)

    def _write(self, file: int, path: str, data: bytes, start: int) -> None:
        written = self._do("write", path, os.pwrite, file, data, start) if data else 0
        while written < len(data):
            written += self._do("write", path, os.pwrite, file, memoryview(data)[written:], start + written)


def batches(jobs: Sequence[Job]) -> list[list[Job]]:
    """Cut small files into what one thread takes at a time."""
    return [list(jobs[i : i + BATCH_FILES]) for i in range(0, len(jobs), BATCH_FILES)]
