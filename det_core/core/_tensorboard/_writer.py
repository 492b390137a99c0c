"""Reported metrics as TensorBoard scalars, without torch or TensorFlow.

Tags are ``<group>/<metric>``: ``training/loss``, ``validation/accuracy``, ``<group>/<metric>`` for a group
of the script's own; a nested dictionary adds a level for each of its keys (``training/loss/box``). Numbers
are written, with NaN and infinities; a bool is written as 0 or 1; what is no number is left out, and so is
a row without a step.

The journal is the record; event files are a view of it. So a report hands its numbers to one thread and
goes on, and a file that cannot be written does not end a training: there is one warning when it happens,
and ``close()`` raises.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core._optional import require
from det_core.core._tensorboard._mode import has_events, installed
from det_core.core._tensorboard._values import Scalar, scalars_of
from det_core.errors import TensorboardError

if TYPE_CHECKING:
    from det_core.core._tensorboard._file import EventFile

logger = logging.getLogger("det_core.core")

MAX_QUEUED = 20_000
"""Reports that wait for the writing thread; one more waits in the caller."""
WAIT_FOR_ROOM = 1.0
"""Seconds that a report waits, at most, in a full queue. The next ones wait no more until there is room
again."""
GATHER = 0.1
"""Seconds that the thread lets reports gather, so that it seldom interrupts the script."""
MAX_AT_ONCE = 5_000
"""Rows that the thread writes before it looks at the time and at the queue again."""
FLUSH_EVERY = 2.0
"""Seconds after which what was written becomes visible to TensorBoard."""
DRAIN = 60.0
"""Seconds that ``flush`` and ``close`` wait for the thread."""

_Row = tuple[float, int, list[tuple[str, Scalar]]]
_FLOATS = frozenset([float])


class EventWriter:
    """Writes scalars into one event file in ``folder``, opened at the first row.

    A file that follows those of an earlier session (a resumed run) begins with a mark by which TensorBoard
    drops what they hold from its first step on, so that a curve has every step once.

    Args:
        folder: where the event file goes; it exists.
        older: whether there are files of an earlier session; None: every event file that is there now is one.

    Raises:
        MissingExtra: tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, older: bool | None = None, max_queued: int = MAX_QUEUED) -> None:
        if not installed():
            require("tensorboard.compat", extra="tensorboard", purpose="writing TensorBoard event files")
        self._folder = folder
        self._older = has_events(folder) if older is None else older
        self._max_queued = max_queued
        self._rows: deque[_Row | threading.Event] = deque()
        self._wake = threading.Condition()
        self._awake = False
        self._hurry = False
        self._closing = False
        self._full = False
        self._lost = 0
        self._unflushed = 0
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def scalars(self, group: str, steps: int | None, metrics: Mapping[str, Any]) -> None:
        """Take the numbers in ``metrics``, as they are now, and write them soon. Never raises.

        Args:
            group: the first part of the tags.
            steps: the step of the points; None: nothing is written.
            metrics: numbers, Python's, numpy's or torch's, and nested dictionaries of them.
        """
        if steps is not None and (values := scalars_of(f"{group}/", metrics)):
            self._take(steps, values)

    def points(self, steps: int, values: Mapping[str, Any]) -> None:
        """Write one point to each tag soon; what is no number is left out. Never raises."""
        found: list[tuple[str, Scalar]] = list(values.items())
        if not _FLOATS.issuperset(map(type, values.values())):
            found = scalars_of("", values)
        if found:
            self._take(steps, found)

    def begin(self, steps: int) -> None:
        """Mark that a session starts at this step, before any of its points."""
        self._take(steps, [])

    def _take(self, steps: int, values: list[tuple[str, Scalar]]) -> None:
        if self._closing or self._pid != os.getpid():
            return
        if self._failure is not None or (len(self._rows) >= self._max_queued and not self._wait_for_room()):
            self._lost += 1
            return
        self._put((time.time(), steps, values))

    def flush(self) -> None:
        """Wait until what was reported is in the file, as far as it can be written."""
        if self._thread is None or self._failure is not None or self._pid != os.getpid():
            return
        done = threading.Event()
        self._put(done, hurry=True)
        deadline = time.monotonic() + DRAIN
        while not done.wait(0.2) and self._thread.is_alive():
            if time.monotonic() > deadline:
                logger.warning("the event file in %s is not up to date after %.0f s", self._folder, DRAIN)
                return

    def close(self) -> None:
        """Write what is left and close the file.

        Raises:
            TensorboardError: rows are missing from the file; the message says how many, where, and why. The
                journal has them.
        """
        if self._closing or self._pid != os.getpid():
            return
        self._closing = True
        if self._thread is not None:
            with self._wake:
                self._wake.notify()
            self._thread.join(DRAIN)
            if self._thread.is_alive() and self._failure is None:
                self._failure = TimeoutError(f"still writing after {DRAIN:.0f} s")
        lost = self._lost + sum(isinstance(row, tuple) for row in self._rows)
        if lost or self._failure is not None:
            why = self._failure or f"the queue of {self._max_queued} was full for {WAIT_FOR_ROOM} s"
            raise TensorboardError(
                f"the TensorBoard events in {self._folder} lack {lost} report(s); the journal has them: {why}"
            ) from self._failure

    def _put(self, item: _Row | threading.Event, *, hurry: bool = False) -> None:
        """Queue ``item``; the lock is taken only when the thread sleeps.

        The thread declares itself asleep before it looks at the queue for the last time, and this method
        looks at that after it has queued: one of the two sees the other.
        """
        if self._thread is None:
            with self._wake:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="det_core-tensorboard", daemon=True)
                    self._thread.start()
        self._rows.append(item)
        if hurry or not self._awake:
            with self._wake:
                self._hurry = self._hurry or hurry
                self._wake.notify()

    def _wait_for_room(self) -> bool:
        """Whether there is room, after a while if need be; False at once if the last wait was in vain."""
        if not self._full:
            with self._wake:
                self._hurry = True
                self._wake.notify()
            deadline = time.monotonic() + WAIT_FOR_ROOM
            while len(self._rows) >= self._max_queued and time.monotonic() < deadline:
                time.sleep(0.002)
        if len(self._rows) < self._max_queued:
            self._full = False
            return True
        if not self._full:
            self._full = True
            logger.warning("event files in %s: the writer cannot keep up, reports are left out", self._folder)
        return False

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except Exception as e:
            self._failure = e
            self._lost += self._unflushed
            logger.warning(
                "no more TensorBoard events are written to %s (the journal has all metrics): %s: %s",
                self._folder, type(e).__name__, e,
            )  # fmt: skip

    def _write_until_closed(self) -> None:
        from det_core.core._tensorboard._file import EventFile

        file: EventFile | None = None
        flush_at: float | None = None
        try:
            while self._sleep(flush_at):
                for _ in range(min(len(self._rows), MAX_AT_ONCE)):
                    item = self._rows.popleft()
                    if isinstance(item, threading.Event):
                        self._flush(file)
                        flush_at = None
                        item.set()
                        continue
                    self._unflushed += 1
                    file = file or EventFile(self._folder, older=self._older)
                    file.write(*item)
                    flush_at = flush_at or time.monotonic() + FLUSH_EVERY
                if flush_at is not None and time.monotonic() >= flush_at:
                    self._flush(file)
                    flush_at = None
            self._flush(file)
        finally:
            if file is not None:
                file.close()

    def _flush(self, file: EventFile | None) -> None:
        if file is not None:
            file.flush()
        self._unflushed = 0

    def _sleep(self, until: float | None) -> bool:
        """Wait for rows, for ``until`` on the monotonic clock, or for the end; False when all is written."""
        with self._wake:
            self._awake = False
            if not self._rows and not self._closing:
                self._wake.wait(None if until is None else max(0.0, until - time.monotonic()))
            self._awake = True
            leisure = not self._hurry and not self._closing and len(self._rows) < self._max_queued // 2
            if self._rows and leisure:
                self._wake.wait(GATHER)
            self._hurry = False
        return bool(self._rows) or not self._closing
