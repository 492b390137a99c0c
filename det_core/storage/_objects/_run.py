"""From a thread of the caller into fsspec's event loop, and back: never waiting for what cannot come."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from det_core.errors import StorageError
from det_core.storage._copy import Progress

T = TypeVar("T")
Item = TypeVar("Item")
TICK = 0.1
"""Seconds between two reports of progress, and looks at the loop's thread."""
PATIENCE = 30.0
"""Seconds in which work that is given up may put things in order."""


class Meter:
    """The bytes that are done. Added to in the loop's thread, read in the caller's."""

    done = 0


Work = Callable[[Meter], Awaitable[T]]


def run(where: str, work: Work[T], progress: Progress | None = None) -> T:
    """Return ``await work(meter)``, done in fsspec's event loop while this thread waits.

    Args:
        where: how messages name the store.
        work: what to do.
        progress: told, in this thread and several times a second, how far the meter went (also if it did not). If it
            raises, or a signal handler does, the work is cancelled and the error goes on when that is over.

    Raises:
        StorageError: the loop's thread has ended.
    """
    from fsspec import asyn

    loop = asyn.get_loop()
    thread: threading.Thread | None = asyn.iothread[0]
    assert thread is not threading.current_thread(), "a store's methods are not for fsspec's own thread"
    call = _Call(loop, work)
    try:
        loop.call_soon_threadsafe(call.start)
    except RuntimeError as e:
        raise _dead(where) from e
    try:
        while not call.ended.wait(TICK):
            if thread is not None and not thread.is_alive():
                raise _dead(where)
            call.report(progress)
        call.report(progress)
    except BaseException:
        call.stop(thread)
        raise
    return call.outcome(where)


def _dead(where: str) -> StorageError:
    text = "the thread of fsspec's event loop has ended: no store can be reached from this process any more"
    return StorageError(errno.ENOTCONN, f"checkpoint store {where}: {text}")


class _Call(Generic[T]):
    def __init__(self, loop: asyncio.AbstractEventLoop, work: Work[T]) -> None:
        self._loop, self._work = loop, work
        self._meter, self._told = Meter(), 0
        self._task: asyncio.Task[None] | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.ended = threading.Event()

    def start(self) -> None:
        self._task = self._loop.create_task(self._do())
        self._task.add_done_callback(lambda _: self.ended.set())

    async def _do(self) -> None:
        try:
            self._result.append(await self._work(self._meter))
        except BaseException as e:
            self._error = e

    def report(self, progress: Progress | None) -> None:
        done = self._meter.done
        if progress is not None:
            progress(done - self._told)
        self._told = done

    def stop(self, thread: threading.Thread | None) -> None:
        """Cancel what runs, and wait until it has ended."""
        for _ in range(3):
            if self.ended.is_set() or self._loop.is_closed() or not (thread and thread.is_alive()):
                return
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
            self.ended.wait(PATIENCE)

    def outcome(self, where: str) -> T:
        error, self._error = self._error, None
        if isinstance(error, asyncio.CancelledError) or not (error or self._result):
            raise _dead(where) from error
        if error is not None:
            raise error
        return self._result[0]


async def spread(items: Iterable[Item], work: Callable[[Item], Awaitable[Any]], workers: int) -> None:
    """Await ``work(item)`` for every item, up to ``workers`` at a time, begun in order.

    The first error cancels the rest, and is raised when all have ended.
    """
    waiting = iter(items)

    async def draw() -> None:
        for item in waiting:
            await work(item)

    tasks = [asyncio.ensure_future(draw()) for _ in range(max(1, workers))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [e for e in outcomes if isinstance(e, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, asyncio.CancelledError)):
        raise error
