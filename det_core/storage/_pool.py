"""Work spread over a bounded number of threads, whose first error is the caller's."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
TICK = 0.1
"""Seconds between two ticks."""


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    done: Callable[[Item], None] | None = None,
    *,
    tick: Callable[[], None] | None = None,
    stop: Callable[[], None] | None = None,
) -> list[Result]:
    """Return ``[work(item) for item in items]``, computed by up to ``threads`` threads.

    The first error cancels what has not begun; it is raised when what had begun is over.

    Args:
        work: called in any thread.
        items: what it is called with.
        threads: 1 does everything in the caller's thread.
        done: called in the caller's thread after each item, in no particular order.
        tick: called in the caller's thread now and then while it waits. What it raises is the first error.
        stop: called in the caller's thread at the first error, before it waits for what had begun.
    """
    done, tick, stop = done or _nothing, tick or _nothing, stop or _nothing
    if threads <= 1 or len(items) <= 1:
        results = []
        for item in items:
            results.append(work(item))
            done(item)
        return results

    from concurrent.futures import Future, ThreadPoolExecutor

    over: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
    pool = ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="det_core-storage")
    try:
        futures = {pool.submit(work, item): item for item in items}
        for future in futures:
            future.add_done_callback(over.put)
        for _ in futures:
            while (ended := _next(over)) is None:
                tick()
            ended.result()
            done(futures[ended])
        return [future.result() for future in futures]
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(over: queue.SimpleQueue[Any]) -> Any:
    """The next that is over; None: there is none for a while."""
    try:
        return over.get(timeout=TICK)
    except queue.Empty:
        return None


def _nothing(*_args: object) -> None:
    """What is called when nobody asks."""
