"""Draws the journal of a process into a TensorBoard event file as it grows.

The journal is the record; an event file is a view of it. One thread looks for what is new once a second and draws it.
So a report does nothing for TensorBoard, and a disk that is full or a file that was deleted costs no training and no
point: there is one warning, and the thread goes on in the journal where the file ends.

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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core._optional import install_command
from det_core.journal import Cursor

if TYPE_CHECKING:
    from det_core.core._event_file import EventFile

logger = logging.getLogger("det_core.core")

INTERVAL = 1.0
"""Seconds between two looks at what is new."""
MAX_WAITING = 100_000
"""Calls of ``write_scalars`` that wait for the thread; what is beyond is counted and left out."""
PATIENCE = 5.0
"""Seconds that ``flush`` and ``close`` wait for the thread."""

Scalar = float | Callable[[], float]
"""A number, or what waits for one that is still on its way from a device."""
Row = tuple[float, int, list[tuple[str, Scalar]]]
"""Wall time, step, and a number for each tag; without any it marks the start of a session."""
_FLOATS = frozenset([float])


class EventWriter:
    """Draws into a file of its own in ``folder``, by a thread that starts when there is something to draw.

    A file that follows those of an earlier session (a resumed run) begins with a mark by which TensorBoard drops what
    they hold from its first step on, so that a curve has every step once.

    Args:
        folder: where the file goes.
        journal: opens the journal to draw; None: only what :meth:`add` is given is drawn.
    """

    def __init__(self, folder: Path, journal: Callable[[], Cursor] | None) -> None:
        self._folder = folder
        self._journal = journal
        self._rows = None if journal is None else journal()
        self._points: deque[Row] = deque()
        self._left_out = 0
        self._follows = _has_events(folder)
        self._mark_below = math.inf if self._follows else 0
        self._file: EventFile | None = None
        self._trouble = ""
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
        if self._follows:
            self.flush()  # what was reported before has its mark
            self._put(steps, [])
            self.flush()

    def flush(self) -> None:
        """Wait until what is new is drawn, as far as the disk takes it; 5 seconds at most."""
        if self._thread is not None and not self._closing and self._pid == os.getpid():
            done = threading.Event()
            self._asked.append(done)
            self._wake.set()
            if not done.wait(PATIENCE):
                logger.warning("the event file in %s is not up to date after %.0f s", self._folder, PATIENCE)

    def close(self) -> bool:
        """Draw what is left and end the thread; False if it takes longer than 5 seconds, and is left behind.

        What the file lacks is told by a warning.
        """
        self._closing = True
        if self._thread is None or self._pid != os.getpid():
            return True
        self._wake.set()
        self._thread.join(PATIENCE)
        in_time = not self._thread.is_alive()
        lacks = [self._trouble] if self._trouble else []
        lacks += [] if in_time else [f"it was not written within {PATIENCE:.0f} s"]
        lacks += [f"write_scalars() was too fast for it {self._left_out} times"] if self._left_out else []
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
        if len(self._points) < MAX_WAITING:
            self._points.append((time.time(), steps, values))
            return
        if not self._left_out:
            logger.warning("event files in %s: write_scalars() is too fast, and points are left out", self._folder)
        self._left_out += 1

    def _run(self) -> None:
        ended = False
        while not ended:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            ended = self._closing
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            try:
                self._draw()
            except Exception as e:  # of the disk, or of a package that is broken: the record is whole without it
                if not self._trouble:
                    logger.warning(
                        "no event file can be written in %s (%s: %s); the journal has all metrics, and it is written "
                        "from there once that is over", self._folder, type(e).__name__, e,
                    )  # fmt: skip
                self._trouble = f"{type(e).__name__}: {e}"
            else:
                self._trouble = ""
            for done in asked:
                done.set()
        if self._file is not None:
            self._file.close()

    def _draw(self) -> None:
        """Bring all that is new into the file. What the disk refuses waits there, and is not drawn again."""
        if self._file is None:
            from det_core.core._event_file import EventFile

            self._file = EventFile(self._folder)
        if self._file.is_gone():
            self._begin_again(self._file)
        self._file.flush()
        while True:
            lines = [] if self._rows is None else self._rows.read()
            rows = [row for line in lines if (row := _row(line.record)) is not None]
            rows += [self._points.popleft() for _ in range(len(self._points))]
            self._add(self._file, rows)
            if self._rows is not None:
                self._rows.mark(lines)
            self._file.flush()
            if not lines:
                return

    def _add(self, file: EventFile, rows: list[Row]) -> None:
        first = min((steps for _, steps, _ in rows), default=math.inf)
        if first < self._mark_below:
            self._mark_below = first
            file.add_session_start(int(first))
        for at, steps, values in rows:
            if values:
                self._mark_below = 0
                file.add(at, steps, [(tag, v if isinstance(v, float) else v()) for tag, v in values])

    def _begin_again(self, file: EventFile) -> None:
        """Draw the journal anew, into a file of the same name: it comes where it was among those of other writers."""
        logger.warning("%s was deleted; it is written again from the journal", file.path)
        file.begin_again()
        self._rows = None if self._journal is None else self._journal()
        self._mark_below = math.inf if self._follows else 0


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


def _row(record: dict[str, Any]) -> Row | None:
    """What a record of the journal has to draw."""
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
