"""Work spread over a bounded number of threads, whose first error is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int, done: Callable[[Item], None] | None = None
) -> list[Result]:
    """Return ``[work(item) for item in items]``, computed by up to ``threads`` threads.

    The first error cancels what has not begun; it is raised when what had begun is over.

    Args:
        work: called in any thread.
        items: what it is called with.
        threads: 1 does everything in the caller's thread.
        done: called in the caller's thread after each item, in no particular order.
    """
    done = done or _nothing
    if threads <= 1 or len(items) <= 1:
        results = []
        for item in items:
            results.append(work(item))
            done(item)
        return results

    from concurrent.futures import ThreadPoolExecutor, as_completed

    pool = ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="det_core-storage")
    try:
        futures = {pool.submit(work, item): item for item in items}
        for future in as_completed(futures):
            future.result()
            done(futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _nothing(_item: object) -> None:
    """What ``done`` is when nobody asks."""
