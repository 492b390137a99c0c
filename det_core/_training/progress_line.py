"""Progress of a training in one line on a terminal or in a notebook; elsewhere, permanent lines."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from det_core._notices import write_quietly

DRAW_INTERVAL = 0.1


class ProgressLine:
    """A line such as ``12/400  31.5 batches/s  0:12 left  loss 0.413``, drawn every :data:`DRAW_INTERVAL` seconds.

    Args:
        stream: output stream. Defaults to stderr, apart from the script's own output.
        unit: name of the counted unit.
    """

    def __init__(self, stream: TextIO | None = None, unit: str = "batches") -> None:
        self._stream = stream
        if stream is None:
            self._stream = sys.stderr
        self._unit = unit
        self._is_notebook = type(self._stream).__module__.startswith("ipykernel.")
        self._width = 0
        self.shown = self._is_notebook or _is_terminal(self._stream)
        """True if a line is drawn; otherwise :meth:`update` has no effect."""
        self._next = 0.0
        self._first: tuple[float, int] | None = None
        self._metrics = ""
        self._drawn = False

    def update(self, done: int, total: int | None, metrics: Mapping[str, Any] | None = None) -> None:
        """Show ``done`` of ``total`` (None if unknown), and metrics that are numbers."""
        if not self.shown:
            return
        if metrics is not None:
            self._metrics = numbers_of(metrics)
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        if now < self._next:
            return
        self._next = now + DRAW_INTERVAL
        self._draw(done, total, now)

    def _draw(self, done: int, total: int | None, now: float) -> None:
        assert self._first is not None
        began, first = self._first
        rate = 0.0
        if now > began:
            rate = (done - first) / (now - began)
        parts = [f"{done} {self._unit}"]
        if total:
            parts = [f"{done}/{total}"]
        if rate:
            parts.append(f"{rate:.3g} {self._unit}/s")
            if total:
                left = max(0, round((total - done) / rate))
                parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        line = "  ".join([*parts, self._metrics])[: shutil.get_terminal_size().columns - 1]
        self._write(line)
        self._drawn = True

    def _write(self, line: str, end: str = "") -> None:
        """Replace the drawn line."""
        start = "\r\x1b[K"
        if self._is_notebook:  # knows the carriage return, and no control sequence that clears a line
            start = f"\r{'':{self._width}}\r"
            self._width = len(line)
        write_quietly(f"{start}{line}{end}", self._stream)

    def say(self, text: str) -> None:
        """Print a permanent line above the drawn one."""
        if self.shown:
            self._write(text, "\n")
        else:
            write_quietly(f"{text}\n", self._stream)

    def close(self) -> None:
        """Remove the line."""
        if self._drawn:
            self._drawn = False
            self._write("")


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # the script has closed it
        return False


def numbers_of(metrics: Mapping[str, Any]) -> str:
    """Format the metrics that are numbers."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))
