"""Something that happens once, and that threads can wait for."""

from __future__ import annotations

import threading

from det_core import _clock

LOOK = 1.0
"""Seconds between two looks whether it has happened: an exception may keep one who waits from letting in the next."""


class Latch:
    """As ``threading.Event`` without a way back, at a fifth of its cost: it is one lock, held until it happens."""

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._open

    def set(self) -> None:
        """It has happened. To be called once."""
        assert not self._open, "it happens once"
        self._open = True
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has happened, waiting so many seconds for that, or as long as it takes."""
        deadline = None if timeout is None else _clock.monotonic() + timeout
        while not self._open:
            left = LOOK if deadline is None else min(LOOK, deadline - _clock.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):
                self._lock.release()  # for the next one who waits
        return True
