"""Which processor a thread runs on, and which it keeps away from."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterable


def current() -> int:
    """The processor that the calling thread runs on; -1: not known."""
    return _sched_getcpu()()


@functools.cache
def _sched_getcpu() -> Callable[[], int]:
    try:
        return ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):  # another C library
        return lambda: -1


class Distance:
    """Keeps threads away from one of the processors that this process may use, if there are others.

    A thread that wakes another one may find it on its own processor, and would have to wait for it, while on the others
    there are threads that wait for this one.

    Args:
        threads: their native ids.
    """

    def __init__(self, threads: Iterable[int]) -> None:
        self._threads = tuple(threads)
        self._all = os.sched_getaffinity(0)
        self._from = -1

    def keep(self, processor: int) -> None:
        """From this one; -1: from none."""
        if processor == self._from:
            return
        self._from = processor
        allowed = self._all - {processor} or self._all
        for thread in self._threads:
            with contextlib.suppress(OSError):  # whoever forbids this decides where they run
                os.sched_setaffinity(thread, allowed)
