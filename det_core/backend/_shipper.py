"""Sending the journal to a master: whole batches to one of det_core, report by report to a Determined master."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from det_core import _clock
from det_core._json import dump
from det_core.backend._master import MasterInfo, metrics_body, progress_body
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


class BatchSender:
    """Posts batches to ``/api/v1/journal`` of our master, which counts each record once, however often it comes.

    Args:
        session: Session with the master.
        trial_id: ID of the trial.
        trial_run_id: Number of its run.
        timeout: Time during which a batch is sent again, in seconds.
        storage_id: The master's number of the storage of the run's checkpoints, if no allocation has chosen it.
    """

    def __init__(
        self,
        session: MasterSession,
        trial_id: int,
        trial_run_id: int,
        *,
        timeout: float = FOREVER,
        storage_id: int | None = None,
    ) -> None:
        self._session = session
        self._timeout = timeout
        self._head = {"trialId": trial_id, "trialRunId": trial_run_id}
        if storage_id is not None:
            self._head["storageId"] = storage_id

    def send(self, restart: int, rank: int, lines: Sequence[Line], on_acked: OnAcked) -> list[Refusal]:
        """Send lines of a journal in order; one that is refused is found by halving the batch.

        Args:
            restart: Restart of the journal.
            rank: Rank of the journal.
            lines: Lines, in order.
            on_acked: Called with those that are acknowledged, as soon as they are.

        Returns:
            Those that the master has refused for their content.

        Raises:
            MasterUnreachable: If the session was closed.
            MasterError: If the master takes nothing more from this process.
        """
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
            refusals = self.send(restart, rank, lines[:half], on_acked)
            return refusals + self.send(restart, rank, lines[half:], on_acked)
        on_acked(lines)
        return []


class ReportSender:
    """Posts report by report to a Determined master, by the routes of the wire contract §5; skips other records.

    Such a master refuses a report with batch metrics that it has already, so a refusal of a report that may have
    arrived before counts as an acknowledgement.

    Args:
        session: Session with the master.
        trial_id: ID of the trial.
        trial_run_id: Number of its run.
        master: Identity of the master.
    """

    def __init__(self, session: MasterSession, trial_id: int, trial_run_id: int, master: MasterInfo) -> None:
        self._session = session
        self._trial_id = trial_id
        self._run_id = trial_run_id
        self._master = master
        self._begun: set[tuple[int, int]] = set()
        """Restart and rank of the journals of which this process has sent a report."""

    def send(self, restart: int, rank: int, lines: Sequence[Line], on_acked: OnAcked) -> list[Refusal]:
        """Send lines of a journal, one report after the other; see :meth:`BatchSender.send`."""
        refusals = []
        for line in lines:
            route, body = self._report(line.record)
            if body is not None:
                # An earlier process may have sent a journal's first report, and died before that was recorded.
                may_be_repeat = (restart, rank) not in self._begun
                self._begun.add((restart, rank))
                try:
                    self._post(f"/api/v1/trials/{self._trial_id}/{route}", body)
                except MasterError as e:
                    if _is_final(e):
                        raise
                    if not (e.status in (409, 500) and (may_be_repeat or e.maybe_applied)):
                        refusals.append(Refusal(line, e))
                        continue
            on_acked([line])
        return refusals

    def _report(self, record: dict[str, Any]) -> tuple[str, Any]:
        """Return the route and the body of a record's report; None as the body if the master takes none."""
        kind = record["kind"]
        if kind == "metrics":
            return "metrics", metrics_body(self._trial_id, self._run_id, record)
        if kind == "progress":
            return "progress", progress_body(record["body"], self._master)
        if kind == "status":
            return "runner/metadata", {"state": record["body"]["status"]}
        return "", None

    def _post(self, route: str, body: Any) -> None:
        """Post; a 500, by which a Determined master also refuses, is tried again until it is known to be a refusal."""
        while True:
            try:
                self._session.call("POST", route, body, timeout=FOREVER)
                return
            except MasterError as e:
                if e.status != 500 or self._works():
                    raise

    def _works(self) -> bool:
        """Return whether the master works, so that a 500 was about the report; wait until it does."""
        start = _clock.monotonic()
        self._session.call("GET", f"/api/v1/trials/{self._trial_id}", timeout=FOREVER, retry_server_errors=True)
        return _clock.monotonic() - start < PROMPT_ANSWER


def _is_final(error: MasterError) -> bool:
    """Return whether the master takes nothing more from here: no answer, no right, no trial, or another run of it."""
    if isinstance(error, (MasterUnreachable, MasterDenied, UnknownToMaster)):
        return True
    # Determined refuses a run that is not the latest by a 500, which only its text tells from a fault.
    return error.status >= 500 and "run id" in str(error).lower()


def send_journal(cursor: Cursor, sender: BatchSender | ReportSender, on_acked: OnAcked) -> Iterator[Refusal]:
    """Send what is left of a journal; yield the records that the master has refused, after acknowledging them."""
    while lines := cursor.read():
        refusals = sender.send(cursor.restart, cursor.rank, lines, on_acked)
        if refusals:
            on_acked([refusal.line for refusal in refusals])  # the master would refuse them again
        yield from refusals


class Shipper:
    """Sends the records of one process to a master, in the background, in order, each once.

    It reads them from the journal's files, so that reports cost nothing more and nothing is kept twice. Its position is
    kept beside the journal. A report never fails because of it: :meth:`drain` and :meth:`close` do.

    Args:
        cursors: Journals to send: that of this process, after those of its predecessors.
        sender: Sends them to the master.
        session: Session of the sender; interrupted when time is over.
        flush: Called, with the seconds it may take, before all that is reported so far must be in the files.
        folder: Directory of the journal, for messages.
        interval: Time between two reads of the journal, in seconds.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        sender: BatchSender | ReportSender,
        session: MasterSession,
        *,
        flush: Callable[[float], None],
        folder: Path,
        interval: float = POLL_INTERVAL,
    ) -> None:
        self._cursors = list(cursors)
        self._sender = sender
        self._session = session
        self._flush = flush
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

    def drain(self, timeout: float) -> None:
        """Return when all that was reported before has arrived.

        Args:
            timeout: Maximum wait in seconds.

        Raises:
            MasterUnreachable: If it has not arrived in that time.
            MasterError: If the master takes nothing more from this process; or it has refused reports, and that was
                not raised before.
        """
        self._session.raise_if_forked()
        deadline = _clock.monotonic() + timeout
        self._flush(timeout / 2)  # a value that never comes from its device must leave time for the others
        with self._changed:
            self._requested += 1
            number = self._requested
            self._changed.notify_all()
            while self._sent < number and self._failure is None:
                remaining = deadline - _clock.monotonic()
                if not self._changed.wait(max(0.0, remaining)) and _clock.monotonic() >= deadline:
                    raise MasterUnreachable(
                        f"{self._session.url} has not taken the reports in {self._folder} within {timeout:.0f} s: "
                        "look whether the master runs and can be reached from here. The reports are safe"
                    )
            if self._failure is not None:
                raise self._copy_failure(self._failure)
            refusals = self._refusals[self._raised :]
            self._raised = len(self._refusals)
        if refusals:
            raise MasterError(_describe_all(refusals), refusals[0].error.status)

    def close(self, timeout: float) -> None:
        """Send what is left as long as there is time, and end the thread. A second call does nothing.

        Args:
            timeout: Maximum wait in seconds.

        Raises:
            ReportsNotShipped: If the master did not get or has refused records.
        """
        if self._is_closed:
            return
        self._is_closed = True
        reason = ""
        try:
            self.drain(timeout)
        except MasterUnreachable:
            reason = f"the master did not take them within {timeout:.0f} s"
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
            for refusal in send_journal(cursor, self._sender, partial(self._on_acked, cursor)):
                logger.warning("the master did not take a report: %s", _describe(refusal))
                with self._changed:
                    self._refusals.append(refusal)

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
