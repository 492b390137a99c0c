"""Work spread over a bounded number of threads, whose first error is the caller's."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

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

    crew = _Crew(work, items)
    try:
        crew.start(min(threads, len(items)))
        for _ in items:
            while (ended := _next(crew.over)) is None:
                tick()
            number, error = ended
            if error is not None:
                raise error
            done(items[number])
        return crew.results
    except BaseException:
        crew.stopped = True
        stop()
        raise
    finally:
        crew.join()


class _Crew(Generic[Item, Result]):
    """Threads that take one item after the other.

    Not those of ``concurrent.futures``, which do nothing more once the main thread has come to its end: a checkpoint
    that is being saved then is finished all the same.
    """

    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> None:
        self.over: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self.results: list[Any] = [None] * len(items)
        self.stopped = False
        self._work = work
        self._items = items
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"det_core-storage-{number}")
            thread.start()
            self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self.stopped and (number := next(self._numbers)) < len(self._items):
            try:
                self.results[number] = self._work(self._items[number])
            except BaseException as e:
                self.stopped = True
                self.over.put((number, e))
                return
            self.over.put((number, None))


def _next(over: queue.SimpleQueue[Any]) -> Any:
    """The next that is over; None: there is none for a while."""
    try:
        return over.get(timeout=TICK)
    except queue.Empty:
        return None


def _nothing(*_args: object) -> None:
    """What is called when nobody asks."""
