"""Draws the journals of a rank into a TensorBoard event file: what earlier processes left, then its own as it grows.

The journal is the record; an event file is a view of it. One thread looks for what is new once a second and draws it.
So a report does nothing for TensorBoard, and neither a full disk nor a deleted file nor a killed process costs a point:
the thread goes on in a journal where the event files end.

Where that is stands beside the journal, in ``drawn-<restart>-<rank>.json``, written just before the event file:
``offset`` counts if ``file`` then ``has`` as many bytes, else ``before``. So wherever a process is killed, the next one
leaves no row out, and draws none twice.

Tags are ``<group>/<metric>``: ``training/loss``, ``validation/accuracy``, ``<group>/<metric>`` for a group of the
script's own; a nested dictionary adds a level for each of its keys (``training/loss/box``). Numbers are drawn, with NaN
and infinities; a bool as 0 or 1; what is no number is left out, and so is a row without a step.
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

from det_core._optional import install_command
from det_core.journal import Cursor, Line

if TYPE_CHECKING:
    from det_core.core._event_file import EventFile

logger = logging.getLogger("det_core.core")

POLL_INTERVAL = 1.0
"""Seconds between two looks at what is new."""
MAX_QUEUED_CALLS = 100_000
"""Calls of ``write_scalars`` that wait for the thread; what is beyond is counted and left out."""
FLUSH_TIMEOUT = 5.0
"""Seconds that ``flush`` and ``close`` wait for the thread."""

Scalar = float | Callable[[], float]
"""A number, or what waits for one that is still on its way from a device."""
Row = tuple[float, int, list[tuple[str, Scalar]] | None]
"""Wall time, step, and a number for each tag. Without any it marks the start of a session at that step; None: at the
step behind a checkpoint that was restored, whatever the steps of the first rows are."""
_FLOATS = frozenset([float])


class EventWriter:
    """Draws into a file of its own in ``folder``, by a thread that starts when there is something to draw.

    A session that follows an earlier one (a resumed run) begins with a mark by which TensorBoard drops what was drawn
    before from its first step on, so that a curve has every step once.

    Args:
        folder: where the file goes.
        journals: the journals to draw, oldest first, the last of them that of this process; without any only what
            :meth:`add` is given is drawn.
        is_resumed: whether copies of this folder may lie beside those of an earlier session.
    """

    def __init__(self, folder: Path, journals: Sequence[Cursor] = (), *, is_resumed: bool = False) -> None:
        self._folder = folder
        earlier = journals[:-1]
        follows = bool(_has_events(folder) or earlier or is_resumed)
        self._sessions = [_Session(cursor, folder, follows=number > 0) for number, cursor in enumerate(earlier)]
        self._sessions.append(_Session(journals[-1] if journals else None, folder, follows=follows, is_own=True))
        self._own = self._sessions[-1]
        self._undrawn: deque[_Session] = deque()
        self._begin()
        self._points: deque[Row] = deque()
        self._dropped = 0
        self._file: EventFile | None = None
        self._last_error = ""
        self._asked: deque[threading.Event] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin to draw. Nothing happens after the end, and in a forked child, which leaves the file to its parent."""
        if self._thread is not None or self._closing or self._pid != os.getpid():
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
        """Take one point for each tag, as it is now; what is no number is left out. Never raises."""
        found: list[tuple[str, Scalar]] = list(values.items())
        if not _FLOATS.issuperset(map(type, values.values())):
            found = _scalars("", values)
        if found:
            self._put(steps, found)

    def mark_session(self, steps: int) -> None:
        """Have it in the file now that a session starts at that step, where there are files of an earlier one."""
        if self._own.follows:
            self.flush()  # what was reported before has its mark
            self._put(steps, [])
            self.flush()

    def flush(self) -> None:
        """Wait until what is new is drawn, as far as the disk takes it; 5 seconds at most."""
        self._start_if_undrawn()
        if self._thread is not None and not self._closing and self._pid == os.getpid():
            done = threading.Event()
            self._asked.append(done)
            self._wake.set()
            if not done.wait(FLUSH_TIMEOUT):
                logger.warning("the event file in %s is not up to date after %.0f s", self._folder, FLUSH_TIMEOUT)

    def close(self) -> bool:
        """Draw what is left and end the thread; False if it takes longer than 5 seconds, and is left behind.

        What the file lacks is told by a warning.
        """
        self._start_if_undrawn()
        self._closing = True
        if self._thread is None or self._pid != os.getpid():
            return True
        self._wake.set()
        self._thread.join(FLUSH_TIMEOUT)
        in_time = not self._thread.is_alive()
        lacks = [self._last_error] if self._last_error else []
        lacks += [] if in_time else [f"it was not written within {FLUSH_TIMEOUT:.0f} s"]
        lacks += [f"write_scalars() was too fast for it {self._dropped} times"] if self._dropped else []
        if lacks:
            logger.warning(
                "the event file in %s lacks points; the journal has all metrics: %s", self._folder, "; ".join(lacks)
            )
        return in_time

    def _put(self, steps: int, values: list[tuple[str, Scalar]]) -> None:
        if self._thread is None:
            self.start()
        if self._closing or self._pid != os.getpid():
            return
        if len(self._points) < MAX_QUEUED_CALLS:
            self._points.append((time.time(), steps, values))
            return
        if not self._dropped:
            logger.warning("event files in %s: write_scalars() is too fast, and points are left out", self._folder)
        self._dropped += 1

    def _start_if_undrawn(self) -> None:
        """Begin to draw where nothing is reported here, but an earlier process has left rows."""
        if self._thread is None and any(session.has_rows() for session in self._sessions[:-1]):
            self.start()

    def _run(self) -> None:
        ended = False
        while not ended:
            self._wake.wait(POLL_INTERVAL)
            self._wake.clear()
            ended = self._closing
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            try:
                self._write_new()
            except Exception as e:  # of the disk, or of a package that is broken: the record is whole without it
                if not self._last_error:
                    logger.warning(
                        "no event file can be written in %s (%s: %s); the journal has all metrics, and it is written "
                        "from there once that is over", self._folder, type(e).__name__, e,
                    )  # fmt: skip
                self._last_error = f"{type(e).__name__}: {e}"
            else:
                self._last_error = ""
            for done in asked:
                done.set()
        if self._file is not None:
            self._file.close()

    def _write_new(self) -> None:
        """Bring all that is new into the file. What the disk refuses waits there, and is not drawn again."""
        if self._file is None:
            from det_core.core._event_file import EventFile

            self._file = EventFile(self._folder)
        file = self._file
        if file.was_deleted():  # its name stays: it comes where it was among those of other writers
            logger.warning("%s was deleted; it is written again from the journal", file.path)
            file.reset()
            self._begin()
        file.flush()
        while len(self._undrawn) > 1:
            self._draw_journal(file, self._undrawn[0])
            self._undrawn.popleft()
        self._draw_journal(file, self._own)
        self._add(file, self._own, [self._points.popleft() for _ in range(len(self._points))])
        file.flush()

    def _draw_journal(self, file: EventFile, session: _Session) -> None:
        while lines := session.read():
            self._add(file, session, [row for line in lines if (row := _row(line.record)) is not None])
            session.advance(lines, file)
            file.flush()

    def _add(self, file: EventFile, session: _Session, rows: list[Row]) -> None:
        # A mark is for all tags, and the steps of one group may be epochs where those of another are batches: the step
        # of a checkpoint that was restored comes before those of the first rows.
        restored = [steps for _, steps, values in rows if values is None]
        first = min(restored or [steps for _, steps, _ in rows], default=math.inf)
        if first < session.mark_below:
            session.mark_below = first
            file.add_session_start(int(first))
        for at, steps, values in rows:
            if values:
                file.add(at, steps, [(tag, v if isinstance(v, float) else v()) for tag, v in values])
        if restored or any(values for _, _, values in rows):
            session.mark_below = 0

    def _begin(self) -> None:
        """Go back to where this file begins; what stood in files that are gone is drawn anew, with all behind it."""
        is_all_gone = not _has_events(self._folder)
        is_anew = is_all_gone
        for session in self._sessions:
            session.begin(is_anew=is_anew, is_all_gone=is_all_gone)
            is_anew = is_anew or session.is_lost
        self._undrawn = deque(self._sessions)


class _Session:
    """What one process has reported, and how far that is drawn.

    Args:
        cursor: its journal; None: only points of :meth:`EventWriter.add`.
        folder: of the event files.
        follows: whether something that its start takes the place of may be drawn before it.
        is_own: whether it is that of this process.

    Attributes:
        is_lost: whether the file it was drawn into is gone.
        mark_below: a row of a smaller step needs a mark before it.
    """

    def __init__(self, cursor: Cursor | None, folder: Path, *, follows: bool, is_own: bool = False) -> None:
        self.follows = follows
        self.mark_below: float = 0
        self._cursor = cursor
        self.is_lost = False
        self._offset = 0
        saved = {} if cursor is None else cursor.saved
        # Not where the process was to draw nothing (in the mode MANUAL): a mark would drop what the script drew then.
        self._needs_mark = is_own or bool(saved)
        match saved:
            case {"offset": int(offset), "before": int(before), "file": str(file), "had": int(had), "has": int(has)}:
                size = _size(folder / file) if has else 0
                self.is_lost = size < 0
                if size >= has:
                    self._offset = offset
                elif size >= 0 or not had:
                    self._offset = before
                self._needs_mark = is_own or not (self._offset or (self.is_lost and had))

    def begin(self, *, is_anew: bool, is_all_gone: bool) -> None:
        """Go back to where this process has found it, or to its start."""
        if self._cursor is not None:
            self._cursor.offset = 0 if is_anew else self._offset
        self.mark_below = math.inf if self.follows and (self._needs_mark or is_all_gone) else 0

    def read(self) -> list[Line]:
        """Return what is to be drawn next."""
        return [] if self._cursor is None else self._cursor.read()

    def has_rows(self) -> bool:
        """Return whether there are points to draw, as far as the next megabyte shows."""
        return any(_row(line.record) for line in self.read())

    def advance(self, lines: list[Line], file: EventFile) -> None:
        """Count lines as drawn that the next flush of a file writes."""
        assert self._cursor is not None
        before = self._cursor.offset
        self._cursor.advance(lines)
        self.remember(before=before, file=file.path.name, had=file.size, has=file.size_after_flush)

    def remember(self, **more: Any) -> None:
        """Save how far it is drawn; where the disk refuses, some points may be drawn twice."""
        if self._cursor is not None:
            with suppress(OSError):
                self._cursor.save(**more)


def is_installed() -> bool:
    """Whether the extra is; a mere folder of that name beside the script is not."""
    found = importlib.util.find_spec("tensorboard")
    return found is not None and found.origin is not None


def _has_events(folder: Path) -> bool:
    """Whether there are event files in a folder; one that cannot be read holds none that TensorBoard shows."""
    try:
        return any("tfevents" in name for name in os.listdir(folder))
    except OSError:
        return False


def _size(path: Path) -> int:
    """Return the size of a file; -1: there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _row(record: dict[str, Any]) -> Row | None:
    """What a record of the journal has to draw."""
    if record["kind"] == "restore" and type(steps := record["body"].get("steps_completed")) is int:
        return record["time"], steps + 1, None
    if record["kind"] != "metrics" or record["steps_completed"] is None:
        return None
    _restore_numbers(record, record.get("nonfinite", ()))
    points = _scalars(f"{record['group']}/", record["metrics"])
    return (record["time"], record["steps_completed"], points) if points else None


def _restore_numbers(record: dict[str, Any], paths: Iterable[list[str | int]]) -> None:
    """Put the numbers back that stand as ``NaN``, ``Infinity`` and ``-Infinity``."""
    for *way, last in paths:
        level: Any = record
        for key in way:
            level = level[key]
        level[last] = float(level[last])


def _scalars(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Scalar]]:
    """Tag and number for each number in ``values``, ``prefix`` before each tag; what is no number is left out."""
    found: list[tuple[str, Scalar]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _scalars(f"{prefix}{key}/", value)
        elif (number := value if type(value) is float else _number(value)) is not None:
            found.append((f"{prefix}{key}", number))
    return found


def _number(value: Any) -> Scalar | None:
    """The number that a value is; None: it is none."""
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
    """A copy on the value's stream: nothing waits for the device here, and a later change in place does not count."""
    copy = value.clone()
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(value.device))

    def wait() -> float:
        copied.synchronize()
        return float(copy)

    return wait
