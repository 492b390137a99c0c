"""Files to objects: large ones in parts, small ones many at a time, each byte read once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from det_core.errors import StorageError
from det_core.storage._copy import Job, Progress
from det_core.storage._io import Disk
from det_core.storage._manifest import CHUNK, FileEntry
from det_core.storage._objects._budget import Budget
from det_core.storage._objects._door import Door
from det_core.storage._objects._files import SMALL, Files, batches
from det_core.storage._objects._run import Meter, run, spread

log = logging.getLogger("det_core.storage")
THREADS = 4
"""That read files and hash them; the network is slower than any two."""


@dataclass
class _Large:
    """A file that goes in parts."""

    job: Job
    part_size: int
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tags: dict[int, Any] = field(default_factory=dict)
    upload: Any = None
    open: bool = False
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def parts(self) -> int:
        return max(1, -(-self.job.size // self.part_size))


class _Part(NamedTuple):
    file: _Large
    number: int
    """From 0."""

    @property
    def start(self) -> int:
        return self.number * self.file.part_size

    @property
    def end(self) -> int:
        return min(self.file.job.size, self.start + self.file.part_size)


def upload(
    door: Door,
    disk: Disk,
    where: str,
    jobs: Sequence[Job],
    progress: Progress | None = None,
    unanswered: Callable[[], object] | None = None,
) -> dict[str, FileEntry]:
    """Put files, whose ``target`` is a key, and return size and digests by name.

    Args:
        door: to the bucket.
        disk: to this machine's file system.
        where: how messages name the checkpoint.
        jobs: what to put.
        progress: told of the bytes done; if it raises, no more is put.
        unanswered: called if a request to store something was given up before its answer: it may be done yet, even
            after this has raised.

    Raises:
        CheckpointError: a file became shorter meanwhile.
        StorageError: the store or the disk refused.

    If it raises, what was put stays, but no object is left unfinished (unless the store cannot be reached).
    """
    if not jobs:
        return {}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="det_core-upload") as pool:
        work = _Upload(door, Files(disk, where, CHUNK), pool)
        try:
            return run(door.where, lambda meter: work.run(jobs, meter), progress)
        finally:
            if work.unanswered and unanswered is not None:
                unanswered()


class _Upload:
    """The work of :func:`upload`.

    Attributes:
        unanswered: whether a request was given up that may be done yet.
    """

    def __init__(self, door: Door, files: Files, pool: ThreadPoolExecutor) -> None:
        self.unanswered = False
        self._door, self._files, self._pool = door, files, pool
        self._budget = Budget()
        self._entries: dict[str, FileEntry] = {}

    async def run(self, jobs: Sequence[Job], meter: Meter) -> dict[str, FileEntry]:
        self._meter = meter
        small = [job for job in jobs if job.size <= SMALL]
        large = [_Large(job, self._part_size(job.size)) for job in jobs if job.size > SMALL]
        items: list[_Part | list[Job]] = [_Part(file, number) for file in large for number in range(file.parts)]
        items += batches(small)
        try:
            await spread(items, self._do, self._door.concurrency)
        except BaseException:
            await self._give_up([file for file in large if file.open])
            raise
        return self._entries

    def _part_size(self, size: int) -> int:
        return -(-max(1, self._door.bucket.part_size(size)) // CHUNK) * CHUNK

    async def _do(self, item: _Part | list[Job]) -> None:
        size = item.end - item.start if isinstance(item, _Part) else sum(job.size for job in item)
        taken = await self._budget.take(size)
        try:
            await (self._put_part(item) if isinstance(item, _Part) else self._put_small(item))
        except BaseException as e:
            self.unanswered |= self._door.unsettled(e)
            raise
        finally:
            self._budget.give(taken)

    async def _put_small(self, jobs: list[Job]) -> None:
        loop, put, entries = asyncio.get_running_loop(), self._door.put, self._entries
        found = await loop.run_in_executor(self._pool, self._files.read_whole, jobs)
        for job, (data, digests) in zip(jobs, found, strict=True):
            await put(job.target or "", data)
            entries[job.name] = FileEntry(job.size, digests)
            self._meter.done += job.size

    async def _put_part(self, part: _Part) -> None:
        file, door = part.file, self._door
        job, key = file.job, file.job.target or ""
        loop = asyncio.get_running_loop()
        data, digests = await loop.run_in_executor(self._pool, self._files.read, job, part.start, part.end)
        if file.parts == 1:
            await door.put(key, data)
            self._entries[job.name] = FileEntry(job.size, digests)
        else:
            await self._begin(file)
            file.tags[part.number] = await door.put_part(key, file.upload, part.number + 1, data)
            file.digests[part.number] = digests
            if len(file.tags) == file.parts:
                await self._finish(file)
        self._meter.done += len(data)

    async def _begin(self, file: _Large) -> None:
        async with file.beginning:
            if not file.open:
                file.upload = await self._door.begin_parts(file.job.target or "", file.job.size)
                file.open = True

    async def _finish(self, file: _Large) -> None:
        numbers = range(file.parts)
        await self._door.finish_parts(file.job.target or "", file.upload, [file.tags[n] for n in numbers])
        file.open = False
        self._entries[file.job.name] = FileEntry(file.job.size, tuple(d for n in numbers for d in file.digests[n]))

    async def _give_up(self, files: list[_Large]) -> None:
        for file in files:
            try:
                await self._door.abort_parts(file.job.target or "", file.upload)
            except StorageError as e:
                log.warning("parts of %s stay until they are collected: %s", file.job.target, e)
