"""The journal of one process: reports go in, in order, and are then safe from the death of the process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core import _clock
from det_core.errors import ContextClosed, ReportsNotKept
from det_core.journal._doors import Doors
from det_core.journal._pending import PendingRow, Waiter
from det_core.journal._sink import LIMIT, Sink

if TYPE_CHECKING:
    from det_core.journal._row import Row
    from det_core.journal._seen import Group, Late

VERSION = 1
STEPS = 2**63
DICTS = frozenset([dict])


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
        doors: the system calls, for tests that fail them.
        limit: bytes kept in memory while nothing can be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        restart: int,
        rank: int,
        trial_id: int | None = None,
        doors: Doors | None = None,
        limit: int = LIMIT,
    ) -> None:
        self._folder, self._stem = Path(folder), f"journal-{restart}-{rank}"
        self._identity = {"run_id": run_id, "restart": restart, "rank": rank, "trial_id": trial_id}
        self._doors, self._limit = doors or Doors(), limit
        self._lock = threading.RLock()
        self._now = _clock.now
        self._seq = 0
        self._out: Sink
        self._dumps: Callable[[Any, None, int], bytes]
        self._flags: int
        self._started = False
        self._groups: dict[str, Group] = {}
        self._waiter = Waiter()
        self._late: Late
        self._lost_values = 0
        self._ended = ""
        _JOURNALS.add(self)

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
            steps_completed: the step the metrics belong to; None for a row that belongs to none.
            metrics: what JSON can hold, and numpy and torch scalars and arrays. CUDA tensors are copied without
                waiting for the device.
            batch_metrics: one dict for each batch since the row before.

        Raises:
            TypeError, ValueError: an argument cannot be stored, or the group, step and key were reported before
                with another value. Nothing is written then.
            ContextClosed: the journal is closed, or this process was forked from the one that opened it.
        """
        with self._lock:
            try:
                state = self._groups.get(group)
            except TypeError:
                state = None
            if (
                state is not None
                and type(steps_completed) is int
                and state.last < steps_completed < STEPS
                and type(metrics) is dict
                and (
                    batch_metrics is None
                    or (type(batch_metrics) is list and DICTS.issuperset(map(type, batch_metrics)))
                )
            ):
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
                    line = self._dumps(record, None, self._flags)
                except TypeError:  # not plain JSON: the careful path knows more, and names what it cannot take
                    line = None
                # orjson writes NaN and infinities as null, without a word. A search for one byte is much faster than
                # one for four, and few metrics have a "u" in their names.
                if line is not None and (line.find(b"u", 60) < 0 or line.find(b"null", 60) < 0):
                    at = self._out.write(line, now, state, steps_completed)
                    state.last, state.line, state.values = steps_completed, line, None
                    if at >= 0:
                        state.written = steps_completed
                        if at >= state.block_end:
                            state.index(self._out.file, at, steps_completed)
                    return
                if self._seq == seq + 1:
                    self._seq = seq
        self._report(group, steps_completed, metrics, batch_metrics)

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record anything that is not a metrics row.

        Args:
            kind: such as ``status``, ``progress``, ``checkpoint``, ``run_end``.
            body: what JSON can hold.

        Raises:
            TypeError, ValueError: the body cannot be stored; the message gives the path.
            ContextClosed: as for :meth:`metrics`.
        """
        from det_core.journal import _line

        with self._lock:
            self._start()
            now = self._now()
            line = _line.straight({"kind": kind, "seq": self._seq, "time": now, "body": body})
            if line is not None:
                self._seq += 1
                self._out.write(line, now)
                return
        from det_core.journal._row import settled

        plain, nonfinite = settled(body, kind)  # not under the lock, as it may wait for a device
        with self._lock:
            self._start()
            now = self._now()
            line = _line.encode({"kind": kind, "seq": self._seq, "time": now, "body": plain}, nonfinite)
            self._seq += 1
            self._out.write(line, now)

    @property
    def file(self) -> Path | None:
        """The file that all reports are in, for another process to force to the disk; None: only :meth:`flush` can."""
        with self._lock:
            return self._out.whole if self._started and not self._ended and not self._waiter.rows() else None

    def flush(self) -> None:
        """Wait for device values, write what is kept in memory and force all of it to the disk.

        Never raises for a disk that refuses; :meth:`close` does.
        """
        if self._ended:
            return
        self._waiter.drain()
        with self._lock:
            if self._started and not self._ended:
                self._out.flush()

    def close(self) -> None:
        """Flush, and close every file and thread. Closing twice is fine.

        Raises:
            ReportsNotKept: records that could not be written, with their number and the folder.
        """
        if self._ended:
            return
        self._waiter.close()
        with self._lock:
            if self._ended:
                return
            self._ended = "the context is closed"
            self._groups = {}
            if not self._started:
                return
            try:
                self._out.close()
            finally:
                self._late.close()
        if self._lost_values:
            raise ReportsNotKept(f"{self._lost_values} value(s) never arrived from their device, in {self._folder}")

    def _report(self, group: Any, steps: Any, metrics: Any, batch_metrics: Any) -> None:
        """The careful path: the first row of a group, a step that is not new, all that is not plain JSON."""
        from det_core.journal._row import Row

        if self._ended:
            raise ContextClosed(f"a report after the end: {self._ended}")
        row = Row(group, steps, metrics, batch_metrics)
        while (waiting := self._submit(row)) is not None:
            waiting()

    def _submit(self, row: Row) -> Callable[[], None] | None:
        """Write a row, or say what to wait for (outside the lock) before trying again."""
        with self._lock:
            self._start()
            state = self._state(row.group)
            step = -1 if row.steps is None else row.steps
            if row.steps is not None and step <= state.last and (known := self._known(state, step, row.keys())):
                if not isinstance(known, dict):
                    return known
                if row.pending and row.keys() & known.keys():
                    return row.settle
                row.subtract(known)
                if not row.keys():
                    self._lost_values += len(row.lost)
                    return None
            seq, now = self._seq, self._now()
            self._seq = seq + 1
            if row.pending:
                self._await(row, state, step, seq, now)
            else:
                self._place(row, state, step, row.line(seq, now), now)
            return None

    def _known(self, state: Group, step: int, keys: frozenset[str]) -> dict[str, Any] | Callable[[], None]:
        """What was reported before at this step, or the pending row to wait for."""
        for waiting in self._waiter.rows():
            if waiting.group == state.name and waiting.step == step and waiting.keys & keys:
                return waiting.finish
        return state.known(step, self._out.kept(state, step), self._out.read)

    def _place(self, row: Row, state: Group, step: int, line: bytes, now: float) -> None:
        self._lost_values += len(row.lost)
        if step < 0:
            self._out.write(line, now)
            return
        at = self._out.write(line, now, state, step)
        if step > state.last:
            state.last, state.line, state.values = step, line, None
        else:
            state.add(step, row.values())
        if at >= 0 and step == state.last:
            state.placed(step, line, self._out.file, at)

    def _await(self, row: Row, state: Group, step: int, seq: int, now: float) -> None:
        """Let the row keep its place and be written when its values are there."""
        if step > state.last:
            state.last, state.line, state.values = step, None, {}

        def write() -> None:
            row.settle()
            with self._lock:
                self._place(row, state, step, row.line(seq, now), now)

        self._waiter.add(PendingRow(row.group, row.steps, row.keys(), write))

    def _state(self, group: str) -> Group:
        from det_core.journal._seen import Group

        state = self._groups.get(group)
        if state is None:
            state = self._groups[group] = Group(group, self._late)
        return state

    def _start(self) -> None:
        """Make ready for the first record."""
        if self._ended:
            raise ContextClosed(f"a report after the end: {self._ended}")
        if self._started:
            return
        from det_core.journal import _line
        from det_core.journal._read import next_seq
        from det_core.journal._seen import Late

        self._dumps, self._flags = _line.dumps, _line.FLAGS
        self._late = Late()
        self._seq = next_seq(self._folder, self._stem)
        header = {
            "kind": "journal",
            "version": VERSION,
            **self._identity,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "time": self._now(),
        }
        self._out = Sink(self._folder, self._stem, _line.encode(header), self._doors, self._new_file, limit=self._limit)
        self._started = True

    def _new_file(self) -> None:
        for state in self._groups.values():
            state.block_end = 0

    def _forked(self) -> None:
        """In a forked child: let go of the parent's files."""
        self._lock = threading.RLock()
        self._ended = self._ended or "this process was forked from the one that opened it, to which the reports belong"
        self._groups = {}
        if self._started:
            self._out.abandon()


_JOURNALS: weakref.WeakSet[Journal] = weakref.WeakSet()


def _after_fork() -> None:
    for journal in list(_JOURNALS):
        journal._forked()


os.register_at_fork(after_in_child=_after_fork)
