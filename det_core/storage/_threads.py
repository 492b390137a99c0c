"""Work spread over a bounded number of threads, whose first error and whose progress are the caller's."""

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
"""Called in the caller's thread with the number of bytes done since the last call. What it raises stops the work."""
PROGRESS_INTERVAL = 0.1
"""Seconds between two ticks."""


class ProgressMeter:
    """Bytes that are done: counted in any thread, told in the one that made this.

    Where telling raises, or :meth:`stop` was called, the other threads end at their next :meth:`add`.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress, self._caller = progress, threading.get_ident()
        self._lock, self._done, self._stopped = threading.Lock(), 0, False

    def add(self, size: int) -> None:
        """Count bytes; raises CheckpointError if all is to stop."""
        if self._stopped:
            raise CheckpointError("stopped")
        with self._lock:
            self._done += size
        if threading.get_ident() == self._caller:
            self.report()

    def report(self) -> None:
        """In the caller's thread: report what came since the last call."""
        with self._lock:
            done, self._done = self._done, 0
        if done and self._progress is not None:
            self._progress(done)

    def stop(self) -> None:
        """Have the other threads end soon."""
        self._stopped = True


def map_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int, meter: ProgressMeter | None = None
) -> list[Result]:
    """Return ``[work(item) for item in items]``, computed by up to ``threads`` threads.

    The first error, also one of the meter's progress or an interrupt of the caller, cancels what has not begun; it is
    raised when what had begun is over.

    The threads are not those of ``concurrent.futures``, which take no more work once the main thread has come to its
    end: a checkpoint that is being saved then is finished all the same. They are daemons: a disk may keep one for
    ever, and Python would wait for it.

    Args:
        work: called in any thread.
        items: what it is called with.
        threads: 1 does everything in the caller's thread, where an interrupt hits the work itself.
        meter: told in the caller's thread after each item and at every tick; stopped at the first error.
    """
    meter = meter or ProgressMeter()
    results: list[Any] = [None] * len(items)
    if threads <= 1 or not items:
        for number, item in enumerate(items):
            results[number] = work(item)
            meter.report()
        return results

    over: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    numbers, cancelled = itertools.count(), threading.Event()

    def run() -> None:
        while not cancelled.is_set() and (number := next(numbers)) < len(items):
            try:
                results[number] = work(items[number])
            except BaseException as e:
                cancelled.set()
                over.put(e)
                return
            over.put(None)

    names = [f"det_core-storage-{n}" for n in range(min(threads, len(items)))]
    workers = [threading.Thread(target=run, name=name, daemon=True) for name in names]
    started = []
    try:
        for thread in workers:
            try:
                thread.start()
            except RuntimeError:  # the process has as many as it may: those that are there do the work
                break
            started.append(thread)
        if not started:
            run()
        left = len(items)
        while left:
            try:
                error = over.get(timeout=PROGRESS_INTERVAL)
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
