"""Work in a bounded number of threads; the caller receives its first error and its progress."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from det_core.errors import CheckpointError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Callback in the caller's thread: receives the number of bytes done since the last call. If it raises, work stops."""
PROGRESS_INTERVAL = 0.1
"""Seconds between two reports while no item completes."""


class ProgressMeter:
    """Count bytes in any thread, report them in the creator's.

    After :meth:`stop`, or if a report raises, other threads end at their next :meth:`add`.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._creator = threading.get_ident()
        self._lock = threading.Lock()
        self._done = 0
        self._is_stopped = False

    def add(self, size: int) -> None:
        """Count bytes.

        Raises:
            CheckpointError: If the work is to stop.
        """
        if self._is_stopped:
            raise CheckpointError("stopped")
        with self._lock:
            self._done += size
        if threading.get_ident() == self._creator:
            self.report()

    def report(self) -> None:
        """Report the bytes counted since the last call. Only the creator's thread may call it."""
        with self._lock:
            done = self._done
            self._done = 0
        if done and self._progress is not None:
            self._progress(done)

    def stop(self) -> None:
        """Let the other threads end at their next :meth:`add`."""
        self._is_stopped = True


def map_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int, meter: ProgressMeter | None = None
) -> list[Result]:
    """Return ``[work(item) for item in items]``, computed by up to ``threads`` threads.

    The first error, including one of the meter's progress or an interrupt of the caller, cancels the items that have
    not begun; it is raised when all others are done.

    Args:
        work: called in any thread.
        items: its arguments.
        threads: maximum number; with 1 all work runs in the caller's thread, and an interrupt hits the work itself.
        meter: reports in the caller's thread after each item and at every interval; stopped at the first error.
    """
    meter = meter or ProgressMeter()
    results: list[Any] = [None] * len(items)
    if threads <= 1 or not items:
        for number, item in enumerate(items):
            results[number] = work(item)
            meter.report()
        return results

    done_items: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    numbers = itertools.count()  # next() on it is atomic: no two threads receive the same number
    cancelled = threading.Event()

    def run() -> None:
        while not cancelled.is_set() and (number := next(numbers)) < len(items):
            try:
                results[number] = work(items[number])
            except BaseException as e:
                cancelled.set()
                done_items.put(e)
                return
            done_items.put(None)

    # Not concurrent.futures, whose threads take no more work once the main thread has ended: a checkpoint that is being
    # saved then is finished. Daemons, as a disk may block one forever, and Python would wait for it.
    names = [f"det_core-storage-{n}" for n in range(min(threads, len(items)))]
    workers = [threading.Thread(target=run, name=name, daemon=True) for name in names]
    started = []
    try:
        for thread in workers:
            try:
                thread.start()
            except RuntimeError:  # the process may not have more: those that have started do the work
                break
            started.append(thread)
        if not started:
            run()
        left = len(items)
        while left:
            try:
                error = done_items.get(timeout=PROGRESS_INTERVAL)
            except queue.Empty:
                meter.report()
                continue
            if error is not None:
                raise error
            left -= 1
            meter.report()
        return results
    except BaseException:
        cancelled.set()
        meter.stop()
        raise
    finally:
        for thread in started:
            thread.join()
