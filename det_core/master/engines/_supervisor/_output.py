"""The output of a script as whole lines of a log."""

from __future__ import annotations

import re
import time
from contextlib import suppress

from ._segments import LogWriter

MAX_LINE_BYTES = 64 * 1024
"""Bytes after which a line goes on in the next one."""
BAR_INTERVAL = 1.0
"""Seconds within which only the last of the lines that a ``\\r`` ends is written: a progress bar draws many."""
_MAX_HELD_BYTES = 16 << 20
_END = re.compile(rb"\r\n|\n|\r")
_KINDS = {"stdout": b" o ", "stderr": b" e "}


class OutputLog:
    """Writes the output of a script to a log, as lines.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r``, and is written once it has ended. While the disk is full the script
    goes on: lines wait, and beyond 16 MB the newest are dropped.

    Args:
        log: Log to write to, which is closed with this one.

    Attributes:
        lost: Bytes that were dropped.
    """

    def __init__(self, log: LogWriter) -> None:
        self._log = log
        self._streams = {stream: _Lines() for stream in _KINDS}
        self._pending = b""
        self.lost = 0

    def add(self, stream: str, data: bytes, *, final: bool = False) -> None:
        """Take output of ``stdout`` or ``stderr``; ``final`` ends a line that has not ended."""
        self._append(stream, self._streams[stream].split(data, final))
        self.flush()

    def flush(self) -> None:
        """Write the progress bars that are due, and what waits, as far as the disk takes it."""
        for stream, lines in self._streams.items():
            self._append(stream, lines.take_due_bar())
        if not self._pending:
            return
        with suppress(OSError):
            while self._pending:
                self._pending = self._pending[self._log.write(self._pending) :]
            self._log.end_segment_if_full()

    def close(self) -> None:
        """Write what waits, and make it durable."""
        for stream in self._streams:
            self.add(stream, b"", final=True)
        self.lost += len(self._pending)
        self._log.close(sync=True)

    def _append(self, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        head = self._log.stamp() + _KINDS[stream]
        data = head + (b"\n" + head).join(lines) + b"\n"
        if len(self._pending) + len(data) > _MAX_HELD_BYTES:
            self.lost += len(data)
        else:
            self._pending += data


class _Lines:
    """Lines of one stream."""

    def __init__(self) -> None:
        self._begun = b""
        self._bar: bytes | None = None
        self._bar_due = 0.0

    def split(self, data: bytes, final: bool) -> list[bytes]:
        """Return the lines that are to be written after this data."""
        data = self._begun + data
        if b"\r" in data or self._bar is not None:
            lines, rest = self._split_bars(data, final)
        else:
            *lines, rest = data.split(b"\n")
        if final and rest:
            lines.append(rest)
            rest = b""
        if len(data) > MAX_LINE_BYTES:
            lines = [piece for line in lines for piece in _cut(line)]
            *pieces, rest = _cut(rest)
            lines += pieces
        self._begun = rest
        return lines

    def take_due_bar(self) -> list[bytes]:
        """Return the last line that a ``\\r`` ended, once its interval is over."""
        if self._bar is None or time.monotonic() < self._bar_due:
            return []
        return self._take_bar()

    def _split_bars(self, data: bytes, final: bool) -> tuple[list[bytes], bytes]:
        """Return the lines that have ended, of those that a ``\\r`` ended one an interval, and what is left."""
        lines: list[bytes] = []
        begin = 0
        for end in _END.finditer(data):
            if end.group() != b"\r":
                lines += self._take_bar()
                lines.append(data[begin : end.start()])
            elif end.end() == len(data) and not final:
                break  # perhaps the half of "\r\n"
            elif end.start() > begin:  # a progress bar begins each line with "\r"
                if self._bar is None:
                    self._bar_due = time.monotonic() + BAR_INTERVAL
                self._bar = data[begin : end.start()]
                lines += self.take_due_bar()
            begin = end.end()
        if final:
            lines += self._take_bar()
        return lines, data[begin:]

    def _take_bar(self) -> list[bytes]:
        bar = self._bar
        self._bar = None
        return [] if bar is None else [bar]


def _cut(line: bytes) -> list[bytes]:
    """Cut a long line into pieces, none of them within a character."""
    pieces = []
    while len(line) > MAX_LINE_BYTES:
        end = MAX_LINE_BYTES
        while end > MAX_LINE_BYTES - 3 and line[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]
