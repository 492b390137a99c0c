"""The journal of one process: ordered reports that survive the death of the process."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from det_core import _clock
from det_core._forks import ForkGuard
from det_core.errors import ContextClosed, ReportsLost
from det_core.journal._devices import HostBuffers, wait_for
from det_core.journal._file import JournalFile
from det_core.journal._run_folder import journal_files
from det_core.journal._scan import next_seq
from det_core.journal._values import NotPlain, Report, read_numbers, to_json_dict

logger = logging.getLogger("det_core")

DEVICE_TIMEOUT = 10.0
"""Maximum seconds that flushing and closing wait for values in flight from a device."""
MAX_CACHED_ROWS = 1_000
"""Rows of a group in each of the two generations that are searched for a repeated step."""
MAX_CACHED_BYTES = 32 * 2**20
"""Bytes of a generation; of very large rows fewer are kept."""
MAX_STEP = 2**63
"""Steps are below this, the range of a signed 64-bit integer."""
_DICT_ONLY = frozenset([dict])
SUCCESS_OUTCOMES = ("completed", "stopped", "preempted")
"""Outcomes of a run that ended as its script intended; a record that lacks reports must not have them."""


class Journal:
    """Append the reports of one process to ``<folder>/journal-<restart>-<rank>.jsonl``.

    The file is created with the first record. A report validates its arguments and never fails after that: lines that
    cannot be written are kept in memory, and :meth:`close` raises if some are lost. Thread-safe.

    Args:
        folder: the run's directory.
        run_id: the run's ID.
        restart: number of the restart of the run that this process belongs to, from 0.
        rank: rank of the process.
        trial_id: the trial, in a managed run.

    Attributes:
        run_id: the run's ID.
        on_first_row: called with the first row of each group before it is written, under the journal's lock. Later rows
            cost nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        restart: int,
        rank: int,
        trial_id: int | None = None,
    ) -> None:
        self.run_id = run_id
        self.on_first_row: Callable[[Report], None] = lambda _row: None
        self._folder = Path(folder)
        self._restart = restart
        self._rank = rank
        self._identity = {"run_id": run_id, "restart": restart, "rank": rank, "trial_id": trial_id}
        # A signal handler may report in the middle of a report of the same thread.
        self._lock = threading.RLock()
        self._now = _clock.now
        self._seq = 0
        self._file: JournalFile
        self._dumps: Callable[[Any, Callable[[Any], Any], int], bytes]
        self._flags: int
        self._started = False
        self._groups: dict[str, _Group] = {}
        self._pending: deque[_PendingRow] = deque()
        self._buffers = HostBuffers()
        self._lost_values = 0
        self._run_end: Mapping[str, Any] | None = None
        self._ended = ""
        _journals.add(self)

    @property
    def damage(self) -> str:
        """Cause of the loss of written reports, as far as detected; empty if there was none."""
        if self._started and self._file.is_truncated:
            return "the journal was truncated by another process"
        return ""

    @property
    def newest_step(self) -> int:
        """The largest step for which this process has reported metrics, or -1."""
        with self._lock:
            return max((group.last for group in self._groups.values()), default=-1)

    def last_step(self, group: str) -> int:
        """Return the largest step that this process has reported in a group, or -1."""
        with self._lock:
            if (state := self._groups.get(group)) is None:
                return -1
            return state.last

    def metrics(
        self,
        group: str,
        steps_completed: int | None,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a row of metrics.

        Args:
            group: a name without ``.``, usually ``training`` or ``validation``.
            steps_completed: the step that the metrics belong to, or None for a row without a step, which these two
                groups reject.
            metrics: values that JSON can hold, and numpy and torch scalars and arrays. CUDA tensors are copied without
                waiting for the device; their row is written by the next report after they have arrived, or the next
                :meth:`flush`.
            batch_metrics: one dict for each batch since the previous row.

        Raises:
            TypeError, ValueError: If an argument cannot be stored, or the same group, step and key were reported with
                another value in one of the group's newest 1,000 rows. Nothing is written then.
            ContextClosed: If the journal is closed, or belongs to the parent of this process.
        """
        with self._lock:
            # The fast path takes exact types alone: a subclass may behave in any way.
            state = self._groups.get(group) if type(group) is str else None
            if (
                state is not None
                and type(steps_completed) is int
                and state.last < steps_completed < MAX_STEP
                and type(metrics) is dict
                and (
                    batch_metrics is None
                    or (type(batch_metrics) is list and _DICT_ONLY.issuperset(map(type, batch_metrics)))
                )
            ):
                if self._pending:
                    self._write_arrived()
                now = self._now()
                seq = self._seq
                self._seq = seq + 1
                record: dict[str, Any] = {
                    "kind": "metrics",
                    "seq": seq,
                    "time": now,
                    "group": group,
                    "steps_completed": steps_completed,
                    "metrics": metrics,
                }
                if batch_metrics is not None:
                    record["batch_metrics"] = batch_metrics
                try:
                    line = self._dumps(record, read_numbers, self._flags)
                except TypeError as e:  # not plain JSON: the slow path converts more, and names what it cannot
                    # orjson wraps every exception from read_numbers() in it, such as a Ctrl-C.
                    if e.__cause__ is not None and not isinstance(e.__cause__, NotPlain):
                        raise e.__cause__ from None
                    line = None
                # orjson silently writes NaN and infinities as null. Searching for one byte is much faster than for
                # four, and few metrics have a "u" in their names.
                if line is not None and (line.find(b"u", 60) < 0 or line.find(b"null", 60) < 0):
                    # _Group.add, inlined. The step comes first, as a signal handler may report a later one now. The
                    # line is copied: it lies in orjson's buffer of 1 KB, and if that were kept, the next report would
                    # allocate another one, cold in the cache.
                    state.last = steps_completed
                    self._file.append(line, now)
                    state.rows[steps_completed] = line[:-1]
                    state.room -= len(line)
                    if state.room < 0 or len(state.rows) >= MAX_CACHED_ROWS:
                        state.rotate()
                    return
                if self._seq == seq + 1:
                    self._seq = seq
        self._report(group, steps_completed, metrics, batch_metrics)

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record anything that is not a metrics row.

        Args:
            kind: such as ``status``, ``progress``, ``checkpoint`` or ``run_end``.
            body: values that JSON can hold, none of them on a device.

        Raises:
            TypeError, ValueError: If the body cannot be stored; the message has the path.
            ContextClosed: As for :meth:`metrics`.
        """
        values, nonfinite = to_json_dict(body, ("body",))
        with self._lock:
            self._start()
            self._write_arrived()
            if kind == "run_end":
                self._run_end = values
            self._append(kind, values, nonfinite)

    def flush(self, timeout: float = DEVICE_TIMEOUT) -> None:
        """Wait for device values, write the backlog and force all of it to the disk.

        A disk that refuses is reported by :meth:`close`, not here. Other threads can report meanwhile.

        Args:
            timeout: maximum wait for device values in seconds, at most 10; rows that still lack some stay pending.
        """
        self._wait_for_devices(min(timeout, DEVICE_TIMEOUT))
        with self._lock:
            if not self._started or self._ended:
                return
            self._file.write_backlog()
            fd = self._file.duplicate()
        if fd is not None:
            self._file.sync(fd)

    def close(self) -> None:
        """Flush, and close the file. Closing twice has no effect.

        If reports are lost and the outcome of the run is a success, it is recorded as ``incomplete``.

        Raises:
            ReportsLost: If records could not be written, or values never arrived from their device.
        """
        try:
            self._wait_for_devices(DEVICE_TIMEOUT)
        finally:  # a second Ctrl-C during the wait must not leave the file open
            with self._lock:
                lost = self._close()
        if lost:
            raise ReportsLost("; ".join(lost))

    def _close(self) -> list[str]:
        """Close, and return a message for each kind of loss."""
        if self._ended:
            return []
        self._ended = "the context is closed"
        self._groups = {}
        if not self._started:
            return []
        while self._pending:
            self._write_pending(self._pending.popleft())
        self._file.write_backlog()
        if (self._file.count_lost() or self._lost_values or self.damage) and self._run_end is not None:
            self._append_incomplete_end(self._run_end)
        lost = []
        if number := self._file.close():
            lost.append(f"lost {number} report(s): cannot write to {self._folder}: {self._file.problem}")
        if self._lost_values:
            lost.append(f"lost {self._lost_values} value(s) in {self._folder}: they never arrived from their device")
        return lost

    def _append_incomplete_end(self, end: Mapping[str, Any]) -> None:
        """Record the outcome once more: a record that lacks reports must not be taken for a complete one."""
        outcome = end.get("outcome")
        if outcome in SUCCESS_OUTCOMES:
            outcome = "incomplete"
        problem = self._file.problem or self.damage or "values never arrived from their device"
        self._append("run_end", {"outcome": outcome, "detail": f"not all reports were kept: {problem}"})

    def _append(self, kind: str, body: Mapping[str, Any], nonfinite: Sequence[Sequence[str | int]] = ()) -> None:
        """Write a record whose body is plain JSON."""
        from det_core.journal._format import encode

        now = self._now()
        self._file.append(encode({"kind": kind, "seq": self._next_seq(), "time": now, "body": body}, nonfinite), now)

    def _next_seq(self) -> int:
        """Return the next number of a record."""
        # No call in between: a signal handler that reports would take the same number.
        seq = self._seq
        self._seq = seq + 1
        return seq

    def _report(self, group: Any, steps: Any, metrics: Any, batch_metrics: Any) -> None:
        """Record a row by the slow path: the first of a group, a repeated step, or values beyond plain JSON."""
        report = Report(group, steps, metrics, batch_metrics, self._buffers)
        with self._lock:
            unresolved = self._submit(report)
        if unresolved:  # without the lock: other threads report meanwhile
            wait_for([value for other in unresolved for value in other.pending], DEVICE_TIMEOUT)
            with self._lock:
                self._submit(report, can_wait=False)

    def _submit(self, report: Report, *, can_wait: bool = True) -> list[Report]:
        """Write a row, unless it must be compared with values of the same step that are still in flight.

        Args:
            report: the row.
            can_wait: whether the caller can wait for these values; if not, only readers compare them.

        Returns:
            The reports to wait for before the next try; empty if the row is done.
        """
        self._start()
        self._write_arrived()
        state = self._groups.get(report.group)
        if state is None:
            self.on_first_row(report)
            state = self._groups[report.group] = _Group()
        if report.steps is not None and report.steps <= state.last:
            known = state.values_at(report.steps)
            keys = report.keys()
            unresolved = [
                other
                for other, *_ in self._pending
                if (other.group, other.steps) == (report.group, report.steps) and other.keys() & keys
            ]
            if keys & known.keys() and not report.ready:
                unresolved.append(report)
            if can_wait and unresolved:
                return unresolved
            if report.ready:
                self._resolve_pending(report)
            report.drop_repeated(known)
            if not report.keys():
                return []
        row = _PendingRow(report, self._next_seq(), self._now())
        if report.ready:
            self._write_pending(row)
        else:
            if report.steps is not None:
                state.last = max(state.last, report.steps)
            self._pending.append(row)
        return []

    def _resolve_pending(self, report: Report) -> None:
        report.resolve_pending()
        self._lost_values += len(report.lost)

    def _write_pending(self, row: _PendingRow) -> None:
        """Write a row whose values have arrived or never will."""
        report = row.report
        if report.pending:
            self._resolve_pending(report)
        line = report.line(row.seq, row.time)
        self._file.append(line, row.time)
        if report.steps is not None and (state := self._groups.get(report.group)) is not None:
            state.add(report.steps, line)

    def _write_arrived(self) -> None:
        """Write pending rows, oldest first, up to the first one whose values are still in flight."""
        while self._pending and self._pending[0].report.ready:
            self._write_pending(self._pending.popleft())

    def _wait_for_devices(self, timeout: float) -> None:
        """Write pending rows as their values arrive, until the timeout."""
        deadline = _clock.monotonic() + timeout
        while True:
            with self._lock:
                if self._ended:
                    return
                self._write_arrived()
                pending = list(self._pending)
            left = deadline - _clock.monotonic()
            if not pending or left <= 0:
                break
            wait_for(pending[0].report.pending, left)
        if pending:
            logger.warning("%d report(s) still wait for their device after %.0f s", len(pending), timeout)

    def _start(self) -> None:
        """Open the journal for the first record."""
        if self._ended:
            raise ContextClosed(f"report after close: {self._ended}")
        if self._started:
            return
        from det_core.journal import _format

        self._dumps = _format.dumps
        self._flags = _format.FLAGS
        self._seq = next_seq(self._folder, self._restart, self._rank)
        header = {
            "kind": "journal",
            "version": _format.VERSION,
            **self._identity,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "time": self._now(),
        }
        self._file = JournalFile(self._path(), _format.encode(header))
        self._started = True

    def _path(self) -> Path:
        """Return the file to write: the last one that this process has, or a new one."""
        own = journal_files(self._folder).get((self._restart, self._rank))
        if own:  # such as of a client, which opens the journal of a run again to record deletions
            return own[-1]
        return self._folder / f"journal-{self._restart}-{self._rank}.jsonl"

    def close_in_child(self) -> None:
        """Close the parent's file after a fork, and reject reports."""
        self._lock = threading.RLock()  # another thread may have held it during the fork
        self._ended = self._ended or "this process was forked from the one that opened the journal: report there"
        self._groups = {}
        self._pending.clear()
        if self._started:
            self._file.close_in_child()


class _PendingRow(NamedTuple):
    """A row that has its place in the record and is written when its values have arrived."""

    report: Report
    seq: int
    time: float


class _Group:
    """The newest rows of a group, to detect a second value for the same step and key.

    Steps mostly grow, and a step above all earlier ones cannot repeat one: that case costs a comparison. The newest
    rows are kept as they were written, in two generations, and decoded when a step comes again.

    Attributes:
        last: the largest step reported so far.
        rows: the newest generation, by step: lines, or the values of a step that has several.
        room: bytes that the generation may still take.
    """

    __slots__ = ("_earlier_rows", "last", "room", "rows")

    def __init__(self) -> None:
        self.last = -1
        self.rows: dict[int, bytes | dict[str, Any]] = {}
        self._earlier_rows: dict[int, bytes | dict[str, Any]] = {}
        self.room = MAX_CACHED_BYTES

    def add(self, step: int, line: bytes) -> None:
        """Add a row that was written."""
        if step > self.last:
            self.last = step
            self.rows[step] = line
        else:
            known = self.values_at(step)
            self.rows[step] = {**known, **_values(line)} if known else line
        self.room -= len(line)
        if self.room < 0 or len(self.rows) >= MAX_CACHED_ROWS:
            self.rotate()

    def rotate(self) -> None:
        """Start the next generation, and drop the one before the last."""
        self._earlier_rows = self.rows
        self.rows = {}
        self.room = MAX_CACHED_BYTES

    def values_at(self, step: int) -> dict[str, Any]:
        """Return the values of a step by key, as far as its rows are cached."""
        row = self.rows.get(step) or self._earlier_rows.get(step) or {}
        if isinstance(row, bytes):
            return _values(row)
        return row


def _values(line: bytes) -> dict[str, Any]:
    from det_core.journal._format import decode, values_by_key

    if (record := decode(line)) is None:
        return {}
    return values_by_key(record)


# A DataLoader worker would write its parent's rows at exit.
_journals = ForkGuard(Journal.close_in_child)
