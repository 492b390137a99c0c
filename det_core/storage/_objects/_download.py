"""Objects to files, or to nothing but the check of their digests: large ones in parts, small ones many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from det_core.errors import CheckpointCorrupt
from det_core.storage._copy import Job, Piece, Progress
from det_core.storage._io import Disk
from det_core.storage._objects._bucket import KeyMissing
from det_core.storage._objects._budget import Budget
from det_core.storage._objects._door import Door
from det_core.storage._objects._files import SMALL, Files, batches
from det_core.storage._objects._run import Meter, run, spread

THREADS = 4
PIECE = 16 << 20
"""Bytes of one request."""
TRIES = 2
"""How often bytes are fetched that differ from the manifest: the network may be at fault."""


def download(
    door: Door,
    disk: Disk,
    where: str,
    work: Sequence[Piece],
    chunk_size: int,
    progress: Progress | None = None,
) -> None:
    """Fetch pieces of objects, whose keys are their jobs' ``source``, compare them, and write those with a target.

    Args:
        door: to the bucket.
        disk: to this machine's file system.
        where: how messages name the checkpoint.
        work: what to fetch; of a job with a target, every piece.
        chunk_size: bytes per digest.
        progress: told of the bytes done; if it raises, no more is fetched.

    Raises:
        CheckpointCorrupt: an object is missing or differs from what is expected.
        StorageError: the store or the disk refused.
    """
    if not work:
        return
    with ThreadPoolExecutor(THREADS, thread_name_prefix="det_core-download") as pool:
        task = _Download(door, Files(disk, where, chunk_size), pool, chunk_size)
        run(door.where, lambda meter: task.run(work, meter), progress)


class _Download:
    def __init__(self, door: Door, files: Files, pool: ThreadPoolExecutor, chunk_size: int) -> None:
        self._door, self._files, self._pool, self._chunk = door, files, pool, chunk_size
        self._budget = Budget()

    async def run(self, work: Sequence[Piece], meter: Meter) -> None:
        self._meter = meter
        large = [piece for piece in work if piece.job.size > SMALL]
        small = [piece.job for piece in work if piece.job.size <= SMALL and piece.first == 0]
        reserve = [piece.job for piece in large if piece.first == 0 and piece.job.target is not None]
        await self._thread(self._files.reserve, reserve)
        items: list[Piece | list[Job]] = [*large, *batches(small)]
        await spread(items, self._do, self._door.concurrency)

    def _thread(self, function: Callable[..., None], *args: object) -> Awaitable[None]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def _do(self, item: Piece | list[Job]) -> None:
        if isinstance(item, Piece):
            return await self._large(item)
        taken = await self._budget.take(sum(job.size for job in item))
        try:
            got = [(job, await self._small(job)) for job in item]
            await self._thread(self._files.write_whole, got)
        finally:
            self._budget.give(taken)
        self._meter.done += sum(job.size for job in item)

    async def _small(self, job: Job) -> bytes:
        """A whole object: one that has become longer comes whole, too."""
        for tries in range(1, TRIES + 1):
            data = await self._get(job, 0, None)
            try:
                self._files.check(job, data, 0, job.size)
                return data
            except CheckpointCorrupt:
                if tries == TRIES:
                    raise
        raise AssertionError("unreachable")

    async def _large(self, piece: Piece) -> None:
        """Chunks that together are one request; or one chunk that is several."""
        if piece.bytes(self._chunk) <= PIECE:
            return await self._chunks(piece)
        job = piece.job
        for number in range(piece.first, piece.first + piece.chunks):
            await self._one_chunk(job, number)

    async def _chunks(self, piece: Piece) -> None:
        job, start, size = piece.job, piece.first * self._chunk, piece.bytes(self._chunk)
        taken = await self._budget.take(size)
        try:
            for tries in range(1, TRIES + 1):
                data = await self._range(job, start, start + size)
                try:
                    await self._thread(self._files.keep, job, data, piece.first, size)
                    break
                except CheckpointCorrupt:
                    if tries == TRIES:
                        raise
        finally:
            self._budget.give(taken)
        self._meter.done += size

    async def _one_chunk(self, job: Job, number: int) -> None:
        """One chunk that is larger than a request should be."""
        digest = self._files.hash()
        end = min(job.size, (number + 1) * self._chunk)
        for start in range(number * self._chunk, end, PIECE):
            size = min(PIECE, end - start)
            taken = await self._budget.take(size)
            try:
                data = await self._range(job, start, start + size)
                if len(data) != size:
                    raise self._files.other_size(job, start + len(data), more=len(data) > size)
                await self._thread(digest.update, data)
                await self._thread(self._files.write, job, data, start)
            finally:
                self._budget.give(taken)
            self._meter.done += size
        if job.expected is not None and digest.hexdigest() != job.expected[number]:
            raise self._files.differs(job, number)

    async def _range(self, job: Job, start: int, end: int) -> bytes:
        """At the end of the file one byte more is asked for, so that an object that is longer is found out."""
        return await self._get(job, start, end + 1 if end == job.size else end)

    async def _get(self, job: Job, start: int, end: int | None) -> bytes:
        try:
            return await self._door.get(job.source, start, end)
        except KeyMissing as e:
            raise self._files.missing(job) from e
