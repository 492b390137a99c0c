"""Values that are on their way to the host, and the rows that wait for them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any


class PendingValue(ABC):
    """A value that was fixed when it was reported and reaches the host a moment later."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether :meth:`result` returns without waiting."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the value and return it as a Python number or nested list.

        Raises:
            Exception: the copy failed; the value is lost.
        """


class LostValue(PendingValue):
    """A value that cannot be had."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def ready(self) -> bool:
        """There is nothing to wait for."""
        return True

    def result(self) -> Any:
        """Raise what happened to it."""
        raise self._error


class PendingRow:
    """A row whose place in the record is taken and whose bytes are written when its values have arrived."""

    def __init__(self, group: str, step: int | None, keys: frozenset[str], write: Callable[[], None]) -> None:
        self.group = group
        self.step = step
        self.keys = keys
        self._write = write
        self._once = threading.Lock()
        self.done = False

    def finish(self) -> None:
        """Wait for the values and write the row, unless that has happened."""
        with self._once:
            if not self.done:
                self._write()
                self.done = True


class Waiter:
    """A thread, started with the first pending row, that writes each row as soon as its values are there."""

    def __init__(self) -> None:
        self._rows: deque[PendingRow] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, row: PendingRow) -> None:
        """Take over a row."""
        with self._wake:
            self._rows.append(row)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="det-core-journal", daemon=True)
                self._thread.start()
            self._wake.notify()

    def rows(self) -> list[PendingRow]:
        """The rows that are not written yet, oldest first."""
        with self._wake:
            return [row for row in self._rows if not row.done]

    def drain(self) -> None:
        """Write every row that is waiting; returns when all of them are written."""
        for row in self.rows():
            row.finish()

    def close(self) -> None:
        """Drain and end the thread."""
        self.drain()
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._rows:
                    if self._closing:
                        return
                    self._wake.wait()
                row = self._rows[0]
            row.finish()
            with self._wake:
                self._rows.popleft()
