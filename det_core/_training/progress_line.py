"""One line that says how far a training is, drawn on a terminal or in a notebook; elsewhere lines that stay."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from det_core._notices import write_quietly

EVERY = 0.1
"""Seconds between two drawings."""


class ProgressLine:
    """Draws ``12/400  31.5 batches/s  0:12 left  loss 0.413``, at most every :data:`EVERY` seconds.

    Args:
        stream: where; left out, stderr, so that the script's own output stays apart.
        unit: what is counted.
    """

    def __init__(self, stream: TextIO | None = None, unit: str = "batches") -> None:
        self._stream = sys.stderr if stream is None else stream
        self._unit = unit
        self._is_notebook = type(self._stream).__module__.startswith("ipykernel.")
        self._width = 0
        self.shown = self._is_notebook or _is_terminal(self._stream)
        """Whether anything is drawn; :meth:`update` need not be called otherwise."""
        self._next = 0.0
        self._first: tuple[float, int] | None = None
        self._metrics = ""
        self._drawn = False

    def update(self, done: int, total: int | None, metrics: Mapping[str, Any] | None = None) -> None:
        """So far ``done`` of ``total``; None: nobody knows of how many. Metrics that are numbers are shown."""
        if not self.shown:
            return
        if metrics is not None:
            self._metrics = numbers_of(metrics)
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        if now < self._next:
            return
        self._next = now + EVERY
        self._draw(done, total, now)

    def _draw(self, done: int, total: int | None, now: float) -> None:
        assert self._first is not None
        began, first = self._first
        rate = (done - first) / (now - began) if now > began else 0.0
        parts = [f"{done}/{total}" if total else f"{done} {self._unit}"]
        if rate:
            parts.append(f"{rate:.3g} {self._unit}/s")
            if total:
                left = max(0, round((total - done) / rate))
                parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        line = "  ".join([*parts, self._metrics])[: shutil.get_terminal_size().columns - 1]
        self._write(line)
        self._drawn = True

    def _write(self, line: str, end: str = "") -> None:
        """Replace what is drawn. A notebook knows the carriage return, and nothing that clears a line."""
        start, self._width = (f"\r{'':{self._width}}\r", len(line)) if self._is_notebook else ("\r\x1b[K", 0)
        write_quietly(f"{start}{line}{end}", self._stream)

    def say(self, text: str) -> None:
        """Write a line that stays, above the one that is drawn."""
        if self.shown:
            self._write(text, "\n")
        else:
            write_quietly(f"{text}\n", self._stream)

    def close(self) -> None:
        """Take the line away."""
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
    """The metrics that are numbers, as text."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))
