"""Background writer of a TensorBoard event file, from the journals of a rank: earlier processes' first, then its own.

The journal is the record; an event file is a view of it. One thread reads new rows once a second and writes them. So a
report does nothing for TensorBoard, and neither a full disk nor a deleted file nor a killed process costs a point: the
thread continues in a journal where the event files end.

That position is stored next to the journal, in ``drawn-<restart>-<rank>.json``, written just before the event file:
``offset`` is valid if ``file`` then has ``has`` bytes, else ``before`` is. So wherever a process is killed, the next
one neither omits a row nor writes one twice.

Tags are ``<group>/<metric>``, such as ``training/loss``; a nested dictionary adds a level for each of its keys
(``training/loss/box``). Numbers are written, also NaN and infinities; a bool as 0 or 1. Other values and rows without a
step are ignored.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core._forks import ForkGuard
from det_core._optional import install_command
from det_core.journal import Cursor, Line

if TYPE_CHECKING:
    from det_core.core._event_file import EventFile

logger = logging.getLogger("det_core.core")

POLL_INTERVAL = 1.0
"""Seconds between two reads of the journal."""
MAX_QUEUED_CALLS = 100_000
"""Maximum number of ``write_scalars`` calls that wait for the thread; more are counted and dropped."""
FLUSH_TIMEOUT = 5.0
"""Maximum wait of ``flush`` and ``close`` for the thread, in seconds."""

Scalar = float | Callable[[], float]
"""A number, or a function that waits for one that is still being copied from a device."""
Row = tuple[float, int, list[tuple[str, Scalar]] | None]
"""Wall time, step, and a number for each tag. An empty list marks the start of a session at that step; None marks it at
the step after a restored checkpoint, whatever the steps of the first rows are."""
_FLOATS = frozenset([float])


class EventWriter:
    """Writer of one event file in ``folder``, in a thread that starts with the first point.

    A session that follows an earlier one (a resumed run) begins with a mark at which TensorBoard drops the points from
    its first step on, so that a curve has every step once.

    Args:
        folder: directory of the file.
        journals: journals to write, oldest first; the last one is this process's. Without any, only the points of
            :meth:`add` are written.
        is_resumed: whether the storage may have event files of an earlier session of this run.
    """

    def __init__(self, folder: Path, journals: Sequence[Cursor] = (), *, is_resumed: bool = False) -> None:
        self._folder = folder
        earlier = journals[:-1]
        follows = bool(_has_events(folder) or earlier or is_resumed)
        self._sessions = [_Session(cursor, folder, follows=number > 0) for number, cursor in enumerate(earlier)]
        self._sessions.append(_Session(journals[-1] if journals else None, folder, follows=follows, is_own=True))
        self._own = self._sessions[-1]
        self._unwritten: deque[_Session] = deque()
        self._rewind()
        self._points: deque[Row] = deque()
        self._dropped = 0
        self._file: EventFile | None = None
        self._last_error = ""
        self._flush_requests: deque[threading.Event] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        _writers.add(self)

    def start(self) -> None:
        """Start the thread. Does nothing after :meth:`close`, and in a forked child."""
        if self._thread is not None or self._closing:
            return
        with self._starting:
            if self._thread is None and is_installed():
                self._own.remember()
                self._thread = threading.Thread(target=self._run, name="det_core-tensorboard", daemon=True)
                self._thread.start()
            elif self._thread is None:
                self._closing = True
                logger.warning("no event files are written: %s", install_command("tensorboard"))

    def add(self, steps: int, values: Mapping[str, Any]) -> None:
        """Queue a point for each tag, with its value at this moment. Ignore values other than numbers. Never raises."""
        points: list[tuple[str, Scalar]] = list(values.items())
        # Most calls have floats alone, which skip the walk: the script waits for this method.
        if not _FLOATS.issuperset(map(type, values.values())):
            points = _scalars("", values)
        if points:
            self._put(steps, points)

    def mark_session(self, steps: int) -> None:
        """Write now that a session starts at that step, if there are files of an earlier session."""
        if self._own.follows:
            self.flush()  # rows that were reported before get their mark first
            self._put(steps, [])
            self.flush()

    def flush(self) -> None:
        """Wait until new points are written, as far as the disk takes them; 5 seconds at most."""
        self._start_if_unwritten()
        if self._thread is not None and not self._closing:
            done = threading.Event()
            self._flush_requests.append(done)
            self._wake.set()
            if not done.wait(FLUSH_TIMEOUT):
                logger.warning("event file in %s not up to date after %.0f s", self._folder, FLUSH_TIMEOUT)

    def close(self) -> bool:
        """Write the remaining points and end the thread. Warn of missing points.

        Returns:
            Whether the thread has ended within 5 seconds; otherwise it is abandoned.
        """
        self._start_if_unwritten()
        self._closing = True
        if self._thread is None:
            return True
        self._wake.set()
        self._thread.join(FLUSH_TIMEOUT)
        in_time = not self._thread.is_alive()
        causes = []
        if self._last_error:
            causes.append(self._last_error)
        if not in_time:
            causes.append(f"not written within {FLUSH_TIMEOUT:.0f} s")
        if self._dropped:
            causes.append(f"dropped {self._dropped} write_scalars() calls: queue full")
        if causes:
            logger.warning(
                "the event file in %s lacks points; the journal has all metrics: %s", self._folder, "; ".join(causes)
            )
        return in_time

    def close_in_child(self) -> None:
        """Leave the file to the parent, as its thread does not run in a forked child."""
        self._closing = True
        self._thread = None

    def _put(self, steps: int, values: list[tuple[str, Scalar]]) -> None:
        if self._thread is None:
            self.start()
        if self._closing:
            return
        if len(self._points) < MAX_QUEUED_CALLS:
            self._points.append((time.time(), steps, values))
            return
        if not self._dropped:
            logger.warning("dropping write_scalars() calls for %s: queue full", self._folder)
        self._dropped += 1

    def _start_if_unwritten(self) -> None:
        """Start the thread if nothing was reported here, but earlier processes have left rows."""
        if self._closing or self._thread is not None:
            return
        if any(session.has_rows() for session in self._sessions[:-1]):
            self.start()

    def _run(self) -> None:
        ended = False
        while not ended:
            self._wake.wait(POLL_INTERVAL)
            self._wake.clear()
            ended = self._closing
            # Taken before the write: a request that comes during it may be of rows that it does not see.
            requests = [self._flush_requests.popleft() for _ in range(len(self._flush_requests))]
            try:
                self._write_new()
            except Exception as e:
                # Of the disk, or of a broken package. The record is complete without the view, so training continues.
                if not self._last_error:
                    logger.warning(
                        "cannot write event file in %s: %s: %s; will retry from the journal, which has all metrics",
                        self._folder, type(e).__name__, e,
                    )  # fmt: skip
                self._last_error = f"{type(e).__name__}: {e}"
            else:
                self._last_error = ""
            for done in requests:
                done.set()
        if self._file is not None:
            self._file.close()

    def _write_new(self) -> None:
        """Write all new points to the file, which keeps in memory what the disk does not take."""
        if self._file is None:
            from det_core.core._event_file import EventFile

            self._file = EventFile(self._folder)
        file = self._file
        if file.was_deleted():
            logger.warning("%s was deleted; writing it again from the journal", file.path)
            # The name stays, so that TensorBoard reads it in the same order among the files of other writers.
            file.reset()
            self._rewind()
        file.flush()
        while len(self._unwritten) > 1:
            self._write_journal(file, self._unwritten[0])
            self._unwritten.popleft()
        self._write_journal(file, self._own)
        self._add(file, self._own, [self._points.popleft() for _ in range(len(self._points))])
        file.flush()

    def _write_journal(self, file: EventFile, session: _Session) -> None:
        while lines := session.read():
            self._add(file, session, [row for line in lines if (row := _row(line.record)) is not None])
            session.advance(lines, file)
            file.flush()

    def _add(self, file: EventFile, session: _Session, rows: list[Row]) -> None:
        # A mark applies to all tags, and the steps of one group may be epochs where those of another are batches: the
        # step of a restored checkpoint outweighs the steps of the first rows.
        restored = [steps for _, steps, values in rows if values is None]
        first = min(restored or [steps for _, steps, _ in rows], default=math.inf)
        if first < session.mark_below:
            session.mark_below = first
            file.add_session_start(int(first))
        for at, steps, values in rows:
            if values:
                file.add(at, steps, [(tag, _value(scalar)) for tag, scalar in values])
        if restored or any(values for _, _, values in rows):
            session.mark_below = 0

    def _rewind(self) -> None:
        """Return to the start of this file; rewrite rows of deleted files, and all rows after them."""
        is_all_gone = not _has_events(self._folder)
        is_anew = is_all_gone
        for session in self._sessions:
            session.begin(is_anew=is_anew, is_all_gone=is_all_gone)
            is_anew = is_anew or session.is_lost
        self._unwritten = deque(self._sessions)


class _Session:
    """Rows of one process, and the position up to which they are written.

    Args:
        cursor: its journal; None if there are only points of :meth:`EventWriter.add`.
        folder: directory of the event files.
        follows: whether points that its start supersedes may be written before it.
        is_own: whether it is this process's.

    Attributes:
        is_lost: whether the file with its rows is gone.
        mark_below: a row of a smaller step needs a mark before it.
    """

    def __init__(self, cursor: Cursor | None, folder: Path, *, follows: bool, is_own: bool = False) -> None:
        self.follows = follows
        self.mark_below: float = 0
        self._cursor = cursor
        self.is_lost = False
        self._offset = 0
        saved: Mapping[str, Any] = {}
        if cursor is not None:
            saved = cursor.saved
        # Without a position the process wrote nothing (mode MANUAL): a mark would drop what its script has written.
        self._needs_mark = is_own or bool(saved)
        match saved:
            case {"offset": int(offset), "before": int(before), "file": str(file), "had": int(had), "has": int(has)}:
                # A position without bytes needs no file: nothing was written yet.
                size = _size(folder / file) if has else 0
                self.is_lost = size < 0
                if size >= has:
                    self._offset = offset
                elif size >= 0 or not had:
                    self._offset = before
                self._needs_mark = is_own or not (self._offset or (self.is_lost and had))

    def begin(self, *, is_anew: bool, is_all_gone: bool) -> None:
        """Return to the position that this process has found, or to the start of the journal."""
        if self._cursor is not None:
            self._cursor.offset = self._offset
            if is_anew:
                self._cursor.offset = 0
        self.mark_below = 0
        if self.follows and (self._needs_mark or is_all_gone):
            self.mark_below = math.inf

    def read(self) -> list[Line]:
        """Return the next lines to write."""
        if self._cursor is None:
            return []
        return self._cursor.read()

    def has_rows(self) -> bool:
        """Return whether there are points to write, as far as the next megabyte shows."""
        return any(_row(line.record) for line in self.read())

    def advance(self, lines: list[Line], file: EventFile) -> None:
        """Advance past lines that the next flush of the file writes."""
        assert self._cursor is not None
        before = self._cursor.offset
        self._cursor.advance(lines)
        self.remember(before=before, file=file.path.name, had=file.size, has=file.size_after_flush)

    def remember(self, **more: Any) -> None:
        """Save the position."""
        if self._cursor is not None:
            with suppress(OSError):  # without it, some points may be written twice
                self._cursor.save(**more)


def is_installed() -> bool:
    """Return whether TensorBoard is installed."""
    spec = importlib.util.find_spec("tensorboard")
    # A directory of that name beside the script is found as a namespace package, without an origin.
    return spec is not None and spec.origin is not None


def _has_events(folder: Path) -> bool:
    """Return whether a directory has event files."""
    try:
        return any("tfevents" in name for name in os.listdir(folder))
    except OSError:  # TensorBoard cannot read it either
        return False


def _size(path: Path) -> int:
    """Return the size of a file in bytes, -1 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _row(record: dict[str, Any]) -> Row | None:
    """Return the points of a record of the journal, or None."""
    if record["kind"] == "restore" and type(steps := record["body"].get("steps_completed")) is int:
        return record["time"], steps + 1, None
    if record["kind"] != "metrics" or record["steps_completed"] is None:
        return None
    _restore_numbers(record, record.get("nonfinite", ()))
    points = _scalars(f"{record['group']}/", record["metrics"])
    if not points:
        return None
    return record["time"], record["steps_completed"], points


def _restore_numbers(record: dict[str, Any], paths: Iterable[list[str | int]]) -> None:
    """Restore numbers at these paths, which JSON has as the texts ``NaN``, ``Infinity`` and ``-Infinity``."""
    for *parents, last in paths:
        level: Any = record
        for key in parents:
            level = level[key]
        level[last] = float(level[last])


def _scalars(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Scalar]]:
    """Return tag and number for each number in ``values``, with ``prefix`` before each tag."""
    points: list[tuple[str, Scalar]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            points += _scalars(f"{prefix}{key}/", value)
        elif (number := _number(value)) is not None:
            points.append((f"{prefix}{key}", number))
    return points


def _value(scalar: Scalar) -> float:
    if isinstance(scalar, float):
        return scalar
    return scalar()


def _number(value: Any) -> Scalar | None:
    """Return the number that a value holds, or None."""
    if type(value) is float:
        return value
    if not isinstance(value, (int, float)) and getattr(value, "shape", None) != ():
        return None
    if getattr(getattr(value, "dtype", None), "kind", "f") in "cSUOMm":
        return None
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach()
            if value.device.type == "cuda":
                return _device_copy(torch, value)
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _device_copy(torch: Any, value: Any) -> Callable[[], float]:
    """Return a function that waits for the value of a CUDA tensor."""
    # A copy on the tensor's stream: nothing waits for the device here, and a later change in place has no effect.
    copy = value.clone()
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(value.device))

    def wait() -> float:
        copied.synchronize()
        return float(copy)

    return wait


# A forked child has no such thread, and would wait for one.
_writers = ForkGuard(EventWriter.close_in_child)
