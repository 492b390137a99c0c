"""The thread that carries the journal to the master."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from det_core import _clock
from det_core.backend._ship_routes import Carrier, Refusal
from det_core.errors import MasterError, MasterUnreachable, ReportsNotShipped
from det_core.journal import Cursor, Line
from det_core.protocol import MasterSession

logger = logging.getLogger("det_core.master")
INTERVAL = 0.5
"""Seconds between two looks for new records, while nobody asks."""
GIVE_UP = 5.0
"""Seconds that the thread gets to end once it is interrupted."""


class Shipper:
    """Carries the records of one process to a master, in the background, in order, each once.

    It reads them from the journal's files, so that reports cost nothing more and nothing is kept twice. How far it got
    is kept beside the journal. A report never fails because of it: :meth:`drain` and :meth:`close` do.

    Args:
        cursors: what to carry: the journal of this process, after those of its predecessors.
        carrier: brings it to the master.
        session: what the carrier uses; interrupted when time is over.
        settle: called, with the seconds it may take, before all that is reported so far must be in the files.
        folder: where the journal lies, for messages.
        interval: seconds between two looks for new records.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        carrier: Carrier,
        session: MasterSession,
        *,
        settle: Callable[[float], None],
        folder: Path,
        interval: float = INTERVAL,
    ) -> None:
        self._cursors, self._carrier, self._session = list(cursors), carrier, session
        self._settle, self._folder, self._interval = settle, folder, interval
        self._changed = threading.Condition()
        self._asked = self._carried = 0
        self._closing = self._closed = False
        self._failure: Exception | None = None
        self._refused: list[Refusal] = []
        self._told = 0
        self._unsaved = False
        self._thread = threading.Thread(target=self._run, name="det-core-ship", daemon=True)
        self._thread.start()

    def drain(self, patience: float) -> None:
        """Return when all that was reported before has arrived.

        Args:
            patience: seconds to wait at most.

        Raises:
            MasterUnreachable: it has not, in that time.
            MasterError: the master takes nothing from this process any more; or it has refused reports, and nobody was
                told.
        """
        self._session.raise_if_forked()
        end = _clock.monotonic() + patience
        self._settle(patience / 2)  # a value that never comes from its device must leave time for the others
        with self._changed:
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            while self._carried < number and self._failure is None:
                if not self._changed.wait(max(0.0, end - _clock.monotonic())) and _clock.monotonic() >= end:
                    raise MasterUnreachable(
                        f"{self._session.url} has not taken the reports in {self._folder} within {patience:.0f} s: "
                        "look whether the master runs and can be reached from here. The reports are safe"
                    )
            if self._failure is not None:
                raise self._again(self._failure)
            news, self._told = self._refused[self._told :], len(self._refused)
        if news:
            raise MasterError(_refusals(news), news[0].error.status)

    def close(self, seconds: float) -> None:
        """Carry what is left, as long as there is time, and end the thread. Twice is fine.

        Args:
            seconds: the time there is.

        Raises:
            ReportsNotShipped: records that the master did not get, or did not take.
        """
        if self._closed:
            return
        self._closed = True
        reason = ""
        try:
            self.drain(seconds)
        except MasterUnreachable:
            reason = f"the master did not take them within {seconds:.0f} s"
        except MasterError as e:
            reason = str(e)
        finally:
            self._end()
        left = sum(cursor.count_remaining() for cursor in self._cursors)
        if left:
            raise ReportsNotShipped(
                f"{left} report(s) did not get to {self._session.url}, and lie in {self._folder}: {reason}"
            )
        if self._refused:
            raise ReportsNotShipped(_refusals(self._refused), self._refused[0].error.status)

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            busy = self._carried < self._asked
        if busy:
            self._session.interrupt()
        self._thread.join(GIVE_UP)
        if self._thread.is_alive():
            logger.warning("the thread that talks to %s has not ended yet", self._session.url)

    def _again(self, failure: Exception) -> Exception:
        """The thread's failure, for one more caller."""
        if isinstance(failure, MasterError):
            return type(failure)(
                f"reports in {self._folder} do not get to the master any more: {failure}", failure.status
            )
        return ReportsNotShipped(f"carrying the reports in {self._folder}: {type(failure).__name__}: {failure}")

    # On the thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._carried == self._asked and not self._closing:
                    self._changed.wait(self._interval)
                asked = self._asked
                if self._closing and asked == self._carried:
                    return
            try:
                self._carry()
            except Exception as e:
                with self._changed:
                    self._failure = e
                    self._changed.notify_all()
                if not self._session.is_closed:
                    logger.error("reports do not get to the master any more, and stay in %s: %s", self._folder, e)
                return
            with self._changed:
                self._carried = asked
                self._changed.notify_all()

    def _carry(self) -> None:
        for cursor in self._cursors:
            arrived = partial(self._arrived, cursor)
            while lines := cursor.read():
                refused = self._carrier.carry(cursor.restart, cursor.rank, lines, arrived)
                for refusal in refused:
                    logger.warning("the master did not take a report: %s", _shown(refusal))
                with self._changed:
                    self._refused += refused
                arrived([refusal.line for refusal in refused])

    def _arrived(self, cursor: Cursor, lines: Sequence[Line]) -> None:
        cursor.advance(lines)
        try:
            cursor.save()
        except OSError as e:
            if not self._unsaved:
                self._unsaved = True
                logger.warning("how far reports were carried cannot be kept in %s: %s", self._folder, e.strerror)


def _shown(refusal: Refusal) -> str:
    """A refused record, in a line."""
    record = refusal.line.record
    what = (
        f"group {record['group']!r}, step {record['steps_completed']}"
        if record["kind"] == "metrics"
        else record["kind"]
    )
    return f"{what}: {refusal.error}"


def _refusals(refused: Sequence[Refusal]) -> str:
    """What the master did not take."""
    others = f"; and {len(refused) - 1} more" if len(refused) > 1 else ""
    return f"the master did not take a report: {_shown(refused[0])}{others}"
