"""Sending the journal to a master: whole batches to one of det_core, report by report to a Determined master."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from det_core import _clock
from det_core._json import dump
from det_core.backend import _bodies as bodies
from det_core.backend._operations import Master
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, ReportsNotShipped, UnknownToMaster
from det_core.journal import Cursor, Line
from det_core.protocol import MasterSession

logger = logging.getLogger("det_core.master")
POLL_INTERVAL = 0.5
"""Time between two reads of the journal while no caller waits, in seconds."""
STOP_TIMEOUT = 5.0
"""Time that the thread may take to end once it is interrupted, in seconds."""
PROMPT_ANSWER = 1.0
"""Time within which a master that works answers, in seconds."""
FOREVER = float("inf")
BAD_RECORD = (400, 413, 422)
"""Statuses about a record; any other is about the run, as 409 of one that has ended."""
OnAcked = Callable[[Sequence[Line]], None]


class Refusal(NamedTuple):
    """A record that the master has refused, and its error."""

    line: Line
    error: MasterError


class Carrier(Protocol):
    """Sends records to a master, in order, however long that takes."""

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: OnAcked) -> list[Refusal]:
        """Send ``lines``.

        Args:
            restart: Restart of the journal.
            rank: Rank of the journal.
            lines: Lines, in order.
            arrived: Called with those that are acknowledged, as soon as they are.

        Returns:
            Those that the master has refused for their content.

        Raises:
            MasterUnreachable: If the session was closed.
            MasterError: If the master takes nothing more from this process.
        """


class JournalCarrier:
    """Posts batches to ``/api/v1/journal``, which counts each record once, however often it comes.

    Args:
        session: Session with the master.
        trial_id: ID of the trial.
        trial_run_id: Number of its run.
        patience: Time during which a batch is sent again, in seconds.
        storage_id: The master's number of the storage of the run's checkpoints, if no allocation has chosen it.
    """

    def __init__(
        self,
        session: MasterSession,
        trial_id: int,
        trial_run_id: int,
        *,
        patience: float = FOREVER,
        storage_id: int | None = None,
    ) -> None:
        self._session = session
        self._timeout = patience
        self._head = {"trialId": trial_id, "trialRunId": trial_run_id}
        if storage_id is not None:
            self._head["storageId"] = storage_id

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: OnAcked) -> list[Refusal]:
        """Post a batch; a refused one in halves, until it is known which record it is."""
        head = {**self._head, "rank": rank, "restart": restart}
        # The lines are JSON already: to parse and write them again would cost more than all the rest.
        body = dump(head)[:-1] + b',"records":[' + b",".join(line.text for line in lines) + b"]}"
        try:
            self._session.call("POST", "/api/v1/journal", body, timeout=self._timeout, retry_server_errors=True)
        except MasterError as e:
            if e.status not in BAD_RECORD:
                raise
            if len(lines) == 1:
                return [Refusal(lines[0], e)]
            half = len(lines) // 2
            refusals = self.carry(restart, rank, lines[:half], arrived)
            return refusals + self.carry(restart, rank, lines[half:], arrived)
        arrived(lines)
        return []


class ReportCarrier:
    """Posts report by report to a Determined master, by the routes of the wire contract §5; skips other records.

    Such a master refuses a report with batch metrics that it has already, so a refusal of a report that may have
    arrived before counts as an acknowledgement.

    Args:
        session: Session with the master.
        trial_id: ID of the trial.
        trial_run_id: Number of its run.
        master: Identity of the master.
        patience: Time during which a report is sent again, in seconds.
    """

    def __init__(
        self,
        session: MasterSession,
        trial_id: int,
        trial_run_id: int,
        master: Master,
        *,
        patience: float = FOREVER,
    ) -> None:
        self._session = session
        self._timeout = patience
        self._trial_id = trial_id
        self._run_id = trial_run_id
        self._master = master
        self._begun: set[tuple[int, int]] = set()
        """Restart and rank of the journals of which this process has sent a report."""

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: OnAcked) -> list[Refusal]:
        """Post one report after the other."""
        senders = {"metrics": self._metrics, "progress": self._progress, "status": self._status}
        refusals = []
        skipped: list[Line] = []
        for line in lines:
            send = senders.get(line.record["kind"])
            if send is None:
                skipped.append(line)
                continue
            # An earlier process may have sent a journal's first report, and died before that was recorded.
            may_be_repeat = (restart, rank) not in self._begun
            self._begun.add((restart, rank))
            try:
                send(line.record)
            except MasterError as e:
                if _is_final(e):
                    raise
                if not (e.status in (409, 500) and (may_be_repeat or e.maybe_applied)):
                    refusals.append(Refusal(line, e))
                    continue
            arrived([*skipped, line])
            skipped = []
        if skipped:
            arrived(skipped)
        return refusals

    def _metrics(self, record: dict[str, Any]) -> None:
        self._call(self._route("metrics"), bodies.metrics(self._trial_id, self._run_id, record))

    def _progress(self, record: dict[str, Any]) -> None:
        body = bodies.progress(record["body"], self._master)
        if body is not None:
            self._call(self._route("progress"), body)

    def _status(self, record: dict[str, Any]) -> None:
        self._call(self._route("runner/metadata"), {"state": record["body"]["status"]})

    def _call(self, route: str, body: Any) -> Any:
        """Post; a 500, by which a Determined master also refuses, is tried again until it is known to be a refusal."""
        while True:
            try:
                return self._session.call("POST", route, body, timeout=self._timeout)
            except MasterError as e:
                if e.status != 500 or self._works():
                    raise

    def _works(self) -> bool:
        """Return whether the master works, so that a 500 was about the report; wait until it does."""
        start = _clock.monotonic()
        self._session.call("GET", f"/api/v1/trials/{self._trial_id}", timeout=self._timeout, retry_server_errors=True)
        return _clock.monotonic() - start < PROMPT_ANSWER

    def _route(self, name: str) -> str:
        return f"/api/v1/trials/{self._trial_id}/{name}"


def _is_final(error: MasterError) -> bool:
    """Return whether the master takes nothing more from here: no answer, no right, no trial, or another run of it."""
    if isinstance(error, (MasterUnreachable, MasterDenied, UnknownToMaster)):
        return True
    # Determined refuses a run that is not the latest by a 500, which only its text tells from a fault.
    return error.status >= 500 and "run id" in str(error).lower()


class Shipper:
    """Sends the records of one process to a master, in the background, in order, each once.

    It reads them from the journal's files, so that reports cost nothing more and nothing is kept twice. Its position is
    kept beside the journal. A report never fails because of it: :meth:`drain` and :meth:`close` do.

    Args:
        cursors: Journals to send: that of this process, after those of its predecessors.
        carrier: Sends them to the master.
        session: Session of the carrier; interrupted when time is over.
        settle: Called, with the seconds it may take, before all that is reported so far must be in the files.
        folder: Directory of the journal, for messages.
        interval: Time between two reads of the journal, in seconds.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        carrier: Carrier,
        session: MasterSession,
        *,
        settle: Callable[[float], None],
        folder: Path,
        interval: float = POLL_INTERVAL,
    ) -> None:
        self._cursors = list(cursors)
        self._carrier = carrier
        self._session = session
        self._flush = settle
        self._folder = folder
        self._interval = interval
        self._changed = threading.Condition()
        self._requested = 0
        self._sent = 0
        self._is_stopping = False
        self._is_closed = False
        self._failure: Exception | None = None
        self._refusals: list[Refusal] = []
        self._raised = 0
        self._cursor_warned = False
        self._thread = threading.Thread(target=self._run, name="det-core-ship", daemon=True)
        self._thread.start()

    def drain(self, patience: float) -> None:
        """Return when all that was reported before has arrived.

        Args:
            patience: Maximum wait in seconds.

        Raises:
            MasterUnreachable: If it has not arrived in that time.
            MasterError: If the master takes nothing more from this process; or it has refused reports, and that was
                not raised before.
        """
        self._session.raise_if_forked()
        deadline = _clock.monotonic() + patience
        self._flush(patience / 2)  # a value that never comes from its device must leave time for the others
        with self._changed:
            self._requested += 1
            number = self._requested
            self._changed.notify_all()
            while self._sent < number and self._failure is None:
                remaining = deadline - _clock.monotonic()
                if not self._changed.wait(max(0.0, remaining)) and _clock.monotonic() >= deadline:
                    raise MasterUnreachable(
                        f"{self._session.url} has not taken the reports in {self._folder} within {patience:.0f} s: "
                        "look whether the master runs and can be reached from here. The reports are safe"
                    )
            if self._failure is not None:
                raise self._copy_failure(self._failure)
            refusals = self._refusals[self._raised :]
            self._raised = len(self._refusals)
        if refusals:
            raise MasterError(_describe_all(refusals), refusals[0].error.status)

    def close(self, seconds: float) -> None:
        """Send what is left as long as there is time, and end the thread. A second call does nothing.

        Args:
            seconds: Maximum wait.

        Raises:
            ReportsNotShipped: If the master did not get or has refused records.
        """
        if self._is_closed:
            return
        self._is_closed = True
        reason = ""
        try:
            self.drain(seconds)
        except MasterUnreachable:
            reason = f"the master did not take them within {seconds:.0f} s"
        except MasterError as e:
            reason = str(e)
        finally:
            self._stop()
        count = sum(cursor.count_remaining() for cursor in self._cursors)
        if count:
            raise ReportsNotShipped(
                f"{count} report(s) did not get to {self._session.url}, and lie in {self._folder}: {reason}"
            )
        if self._refusals:
            raise ReportsNotShipped(_describe_all(self._refusals), self._refusals[0].error.status)

    def _stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            is_busy = self._sent < self._requested
        if is_busy:
            self._session.interrupt()
        self._thread.join(STOP_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("the thread that talks to %s has not ended yet", self._session.url)

    def _copy_failure(self, failure: Exception) -> Exception:
        # Each caller raises an exception of its own: tracebacks of one that is raised twice are mixed up.
        if isinstance(failure, MasterError):
            return type(failure)(
                f"reports in {self._folder} do not get to the master any more: {failure}", failure.status
            )
        return ReportsNotShipped(f"sending the reports in {self._folder}: {type(failure).__name__}: {failure}")

    # On the thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._sent == self._requested and not self._is_stopping:
                    self._changed.wait(self._interval)
                # Taken before the files are read: what is requested later may not be in them.
                requested = self._requested
                if self._is_stopping and requested == self._sent:
                    return
            try:
                self._send_new()
            except Exception as e:
                with self._changed:
                    self._failure = e
                    self._changed.notify_all()
                if not self._session.is_closed:
                    logger.error("reports do not get to the master any more, and stay in %s: %s", self._folder, e)
                return
            with self._changed:
                self._sent = requested
                self._changed.notify_all()

    def _send_new(self) -> None:
        for cursor in self._cursors:
            on_acked = partial(self._on_acked, cursor)
            while lines := cursor.read():
                refusals = self._carrier.carry(cursor.restart, cursor.rank, lines, on_acked)
                for refusal in refusals:
                    logger.warning("the master did not take a report: %s", _describe(refusal))
                with self._changed:
                    self._refusals += refusals
                # The master would refuse them again.
                on_acked([refusal.line for refusal in refusals])

    def _on_acked(self, cursor: Cursor, lines: Sequence[Line]) -> None:
        cursor.advance(lines)
        try:
            cursor.save()
        except OSError as e:
            # The next process sends them again, and the master counts them once.
            if not self._cursor_warned:
                self._cursor_warned = True
                logger.warning("how far reports were carried cannot be kept in %s: %s", self._folder, e.strerror)


def _describe(refusal: Refusal) -> str:
    """Return a refused record in one line."""
    record = refusal.line.record
    name = record["kind"]
    if name == "metrics":
        name = f"group {record['group']!r}, step {record['steps_completed']}"
    return f"{name}: {refusal.error}"


def _describe_all(refusals: Sequence[Refusal]) -> str:
    """Return the first refused record, and the number of others."""
    text = f"the master did not take a report: {_describe(refusals[0])}"
    if len(refusals) > 1:
        text += f"; and {len(refusals) - 1} more"
    return text
