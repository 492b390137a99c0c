"""The journal of one process: reports go in, in order, and are then safe from the death of the process."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from det_core import _clock
from det_core.errors import ContextClosed, ReportsLost
from det_core.journal._devices import HostBuffers, wait_for
from det_core.journal._file import JournalFile
from det_core.journal._run_folder import journal_files
from det_core.journal._scan import next_seq
from det_core.journal._values import NotPlain, Report, read_numbers, to_json_dict

logger = logging.getLogger("det_core")

DEVICE_TIMEOUT = 10.0
"""Seconds that flushing and closing wait for values that are on their way from a device."""
MAX_CACHED_ROWS = 1_000
"""Rows of a group among which a repeated step is looked for; up to twice as many are kept."""
MAX_CACHED_BYTES = 32 * 2**20
"""What these rows may take at most: of huge rows fewer are kept."""
MAX_STEP = 2**63
DICTS = frozenset([dict])
SUCCESS_OUTCOMES = ("completed", "stopped", "preempted")


class Journal:
    """Appends the reports of one process to ``<folder>/journal-<restart>-<rank>.jsonl``.

    The file is made with the first record. A report validates its arguments, then never fails: what cannot be
    written is kept in memory, and :meth:`close` says what was not kept in the end. All methods may be called
    from any thread.

    Args:
        folder: the run's folder.
        run_id: the run's id.
        restart: which restart of the run this process belongs to, from 0.
        rank: the process's rank.
        trial_id: the trial, in a managed run.

    Attributes:
        run_id: the run's id.
        on_first_row: called with the first row of each group before it is written, under the journal's lock. A later
            row does not pay for it.
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
        self._folder, self._restart, self._rank = Path(folder), restart, rank
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
        self._waiting: deque[_PendingRow] = deque()
        self._buffers = HostBuffers()
        self._lost_values = 0
        self._run_end: Mapping[str, Any] | None = None
        self._ended = ""
        _JOURNALS.add(self)

    @property
    def damage(self) -> str:
        """How reports that had been written were lost, as far as was seen; empty: they were not."""
        is_truncated = self._started and self._file.is_truncated
        return "the journal was truncated by another process" if is_truncated else ""

    @property
    def newest_step(self) -> int:
        """The largest step of which this process has reported metrics; -1 before."""
        with self._lock:
            return max((group.last for group in self._groups.values()), default=-1)

    def last_step(self, group: str) -> int:
        """Return the largest step that this process has reported in a group; -1 before."""
        with self._lock:
            state = self._groups.get(group)
            return -1 if state is None else state.last

    def metrics(
        self,
        group: str,
        steps_completed: int | None,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a row of metrics.

        Args:
            group: a name without ``.``; ``training`` and ``validation`` are the usual ones.
            steps_completed: the step the metrics belong to; None for a row that belongs to none, which those two
                groups do not have.
            metrics: what JSON can hold, and numpy and torch scalars and arrays. CUDA tensors are copied without
                waiting for the device; their row is on disk with the next report after they have arrived, or the
                next :meth:`flush`.
            batch_metrics: one dict for each batch since the row before.

        Raises:
            TypeError, ValueError: an argument cannot be stored, or the group, step and key were reported before
                with another value, in one of the group's newest 1,000 rows. Nothing is written then.
            ContextClosed: the journal is closed, or this process was forked from the one that opened it.
        """
        with self._lock:
            state = self._groups.get(group) if type(group) is str else None
            if (
                state is not None
                and type(steps_completed) is int
                and state.last < steps_completed < MAX_STEP
                and type(metrics) is dict
                and (
                    batch_metrics is None
                    or (type(batch_metrics) is list and DICTS.issuperset(map(type, batch_metrics)))
                )
            ):
                if self._waiting:
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
                except TypeError as e:  # not plain JSON: the careful path knows more, and names what it cannot take
                    # orjson hides behind it whatever ends read_numbers(), such as a Ctrl-C that comes just then.
                    if e.__cause__ is not None and not isinstance(e.__cause__, NotPlain):
                        raise e.__cause__ from None
                    line = None
                # orjson writes NaN and infinities as null, without a word. A search for one byte is much faster than
                # one for four, and few metrics have a "u" in their names.
                if line is not None and (line.find(b"u", 60) < 0 or line.find(b"null", 60) < 0):
                    # As _Group.add does, without the call. First of all the step: a signal handler may report a later
                    # one now. A copy of the line: orjson's own lies in a buffer of 1 KB, and were that kept, the next
                    # report would take another one, cold in the cache.
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
            kind: such as ``status``, ``progress``, ``checkpoint``, ``run_end``.
            body: what JSON can hold; nothing that is on a device.

        Raises:
            TypeError, ValueError: the body cannot be stored; the message gives the path.
            ContextClosed: as for :meth:`metrics`.
        """
        values, nonfinite = to_json_dict(body, ("body",))
        with self._lock:
            self._start()
            self._write_arrived()
            if kind == "run_end":
                self._run_end = values
            self._append(kind, values, nonfinite)

    def flush(self, timeout: float = DEVICE_TIMEOUT) -> None:
        """Wait for device values, write what is kept in memory and force all of it to the disk.

        Never raises for a disk that refuses; :meth:`close` does. Reports do not wait meanwhile.

        Args:
            timeout: seconds to wait for device values, 10 at most; rows that still lack some are not written yet.
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
        """Flush, and close the file. Closing twice is fine.

        Where reports are lost and the run was said to end as wished, it is recorded as ``incomplete``.

        Raises:
            ReportsLost: records that could not be written, with their number and the folder, or values that never
                came from their device.
        """
        try:
            self._wait_for_devices(DEVICE_TIMEOUT)
        finally:  # a second Ctrl-C while it waits must not leave the file open
            with self._lock:
                lost = self._close()
        if lost:
            raise ReportsLost("; ".join(lost))

    def _close(self) -> list[str]:
        """Close, and return what was lost, in words."""
        if self._ended:
            return []
        self._ended = "the context is closed"
        self._groups = {}
        if not self._started:
            return []
        while self._waiting:
            self._write_waiting(self._waiting.popleft())
        self._file.write_backlog()
        if (self._file.count_lost() or self._lost_values or self.damage) and self._run_end is not None:
            self._append_incomplete_end(self._run_end)
        lost = []
        if number := self._file.close():
            lost.append(f"{number} report(s) could not be written to {self._folder}: {self._file.problem}")
        if self._lost_values:
            lost.append(f"{self._lost_values} value(s) never arrived from their device, in {self._folder}")
        return lost

    def _append_incomplete_end(self, end: Mapping[str, Any]) -> None:
        """Say how the run ended once more: a record that lacks reports must not be taken for a whole one."""
        outcome = "incomplete" if end.get("outcome") in SUCCESS_OUTCOMES else end.get("outcome")
        problem = self._file.problem or self.damage or "values never arrived from their device"
        self._append("run_end", {"outcome": outcome, "detail": f"not all reports were kept: {problem}"})

    def _append(self, kind: str, body: Mapping[str, Any], nonfinite: Sequence[Sequence[str | int]] = ()) -> None:
        """Write a record whose body is plain JSON."""
        from det_core.journal._format import encode

        now = self._now()
        self._file.append(encode({"kind": kind, "seq": self._next_seq(), "time": now, "body": body}, nonfinite), now)

    def _next_seq(self) -> int:
        """A number for a record; without a call in between, so that no signal handler takes the same."""
        seq = self._seq
        self._seq = seq + 1
        return seq

    def _report(self, group: Any, steps: Any, metrics: Any, batch_metrics: Any) -> None:
        """The careful path: the first row of a group, a step that is not new, all that is not plain JSON."""
        report = Report(group, steps, metrics, batch_metrics, self._buffers)
        with self._lock:
            unknown = self._submit(report)
        if unknown:  # not under the lock: others go on
            wait_for([value for other in unknown for value in other.pending], DEVICE_TIMEOUT)
            with self._lock:
                self._submit(report, patient=False)

    def _submit(self, report: Report, *, patient: bool = True) -> list[Report]:
        """Write a row, unless values must come from a device first to compare it with one of the same step.

        Args:
            report: the row.
            patient: whether to ask for that; else what has not come is not compared, but by readers.

        Returns:
            The reports whose values to wait for; none: it is done.
        """
        self._start()
        self._write_arrived()
        state = self._groups.get(report.group)
        if state is None:
            self.on_first_row(report)
            state = self._groups[report.group] = _Group()
        if report.steps is not None and report.steps <= state.last:
            known, keys = state.values_at(report.steps), report.keys()
            unknown = [
                other
                for other, *_ in self._waiting
                if (other.group, other.steps) == (report.group, report.steps) and other.keys() & keys
            ]
            if keys & known.keys() and not report.ready:
                unknown.append(report)
            if patient and unknown:
                return unknown
            if report.ready:
                self._resolve_pending(report)
            report.drop_repeated(known)
            if not report.keys():
                return []
        row = _PendingRow(report, self._next_seq(), self._now())
        if report.ready:
            self._write_waiting(row)
        else:
            state.last = max(state.last, -1 if report.steps is None else report.steps)
            self._waiting.append(row)
        return []

    def _resolve_pending(self, report: Report) -> None:
        report.resolve_pending()
        self._lost_values += len(report.lost)

    def _write_waiting(self, row: _PendingRow) -> None:
        """Write a row whose values are there, or never will be."""
        report = row.report
        if report.pending:
            self._resolve_pending(report)
        line = report.line(row.seq, row.time)
        self._file.append(line, row.time)
        if report.steps is not None and (state := self._groups.get(report.group)) is not None:
            state.add(report.steps, line)

    def _write_arrived(self) -> None:
        """Write the rows that waited for a device and have their values now, oldest first."""
        while self._waiting and self._waiting[0].report.ready:
            self._write_waiting(self._waiting.popleft())

    def _wait_for_devices(self, timeout: float) -> None:
        """Write the rows that wait for a device, as far as their values come in time."""
        deadline = _clock.monotonic() + timeout
        while True:
            with self._lock:
                if self._ended:
                    return
                self._write_arrived()
                waiting = list(self._waiting)
            left = deadline - _clock.monotonic()
            if not waiting or left <= 0:
                break
            wait_for(waiting[0].report.pending, left)
        if waiting:
            logger.warning(
                "the values of %d report(s) have not come from their device within %.0f s", len(waiting), timeout
            )

    def _start(self) -> None:
        """Make ready for the first record."""
        if self._ended:
            raise ContextClosed(f"a report after the end: {self._ended}")
        if self._started:
            return
        from det_core.journal import _format

        self._dumps, self._flags = _format.dumps, _format.FLAGS
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
        """The file to write: the last of this process's, where it wrote before (a client, which notes deletions)."""
        own = journal_files(self._folder).get((self._restart, self._rank))
        return own[-1] if own else self._folder / f"journal-{self._restart}-{self._rank}.jsonl"

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's file."""
        self._lock = threading.RLock()
        self._ended = self._ended or "this process was forked from the one that opened it, to which the reports belong"
        self._groups = {}
        self._waiting.clear()
        if self._started:
            self._file.close_in_child()


class _PendingRow(NamedTuple):
    """A row whose place in the record is taken, and which is written when its values are there."""

    report: Report
    seq: int
    time: float


class _Group:
    """What a group's newest rows said, to find out a second value for the same step and key.

    Steps mostly grow, and a step larger than all before it cannot repeat one: that case costs a comparison. The newest
    rows are kept as they were written, in two generations, and read again when a step comes again.

    Attributes:
        last: the largest step reported so far.
        rows: the newest generation, by step: lines, or the values of a step that has several.
        room: bytes that it may still take.
    """

    __slots__ = ("_last_earlier", "last", "room", "rows")

    def __init__(self) -> None:
        self.last = -1
        self.rows: dict[int, bytes | dict[str, Any]] = {}
        self._last_earlier: dict[int, bytes | dict[str, Any]] = {}
        self.room = MAX_CACHED_BYTES

    def add(self, step: int, line: bytes) -> None:
        """Note a row that was written."""
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
        """Begin the next generation."""
        self._last_earlier, self.rows, self.room = self.rows, {}, MAX_CACHED_BYTES

    def values_at(self, step: int) -> dict[str, Any]:
        """The values of a step by key, as far as its rows are remembered."""
        found = self.rows.get(step) or self._last_earlier.get(step) or {}
        return _values(found) if isinstance(found, bytes) else found


def _values(line: bytes) -> dict[str, Any]:
    from det_core.journal._format import decode, values_by_key

    record = decode(line)
    return {} if record is None else values_by_key(record)


_JOURNALS: weakref.WeakSet[Journal] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the parent's journals in a child: else a DataLoader worker's end would write its parent's rows."""
    for journal in list(_JOURNALS):
        journal.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
