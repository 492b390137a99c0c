"""The log of a script: whole lines of its output, several to a record."""

from __future__ import annotations

import codecs
import json
import os
import re
import time
from contextlib import suppress

MAX_LINE_CHARS = 64 * 1024
"""Characters after which a line goes on in the next one."""
_MAX_HELD_BYTES = 16 << 20
_END = re.compile(r"\r\n|\n|\r")


class OutputLog:
    """Appends the output of a script to a file, as lines.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r`` (progress bars), and stands in the file once it has ended, so that a
    reader needs to remember one offset only. While the disk is full the script goes on: records wait, and beyond
    16 MB the newest are dropped.

    Args:
        path: the file.

    Attributes:
        lost: bytes of records that were dropped.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._streams = {"stdout": _Lines(), "stderr": _Lines()}
        self._pending = b""
        self.lost = 0

    def add(self, stream: str, data: bytes, *, final: bool = False) -> None:
        """Take output of ``stdout`` or ``stderr``; ``final`` ends a line that has not ended."""
        lines = self._streams[stream].split(data, final)
        if lines:
            record = {"time": round(time.time(), 6), "stream": stream, "lines": lines}
            line = json.dumps(record).encode() + b"\n"
            if len(self._pending) + len(line) > _MAX_HELD_BYTES:
                self.lost += len(line)
            else:
                self._pending += line
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the disk takes it."""
        with suppress(OSError):
            while self._pending:
                self._pending = self._pending[os.write(self._fd, self._pending) :]

    def close(self) -> None:
        """Write what waits, and make it durable."""
        for stream in self._streams:
            self.add(stream, b"", final=True)
        self.lost += len(self._pending)
        with suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)


class _Lines:
    """Lines of one stream."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""

    def split(self, data: bytes, final: bool) -> list[str]:
        """Return the lines that have ended with this data."""
        text = self._begun + self._decoder.decode(data, final)
        if "\r" in text:
            lines, rest = _split_all(text, final)
        else:
            *lines, rest = text.split("\n")
        if final and rest:
            lines.append(rest.rstrip("\r"))
            rest = ""
        whole = [piece for line in lines for piece in _cut(line)]
        if len(rest) > MAX_LINE_CHARS:
            *pieces, rest = _cut(rest)
            whole += pieces
        self._begun = rest
        return whole


def _split_all(text: str, final: bool) -> tuple[list[str], str]:
    """Return the lines that have ended, and what is left."""
    lines = []
    begin = 0
    for end in _END.finditer(text):
        if end.group() == "\r" and end.end() == len(text) and not final:
            break  # perhaps the half of "\r\n"
        if end.start() > begin or end.group() != "\r":  # a progress bar begins each line with "\r"
            lines.append(text[begin : end.start()])
        begin = end.end()
    return lines, text[begin:]


def _cut(line: str) -> list[str]:
    if len(line) <= MAX_LINE_CHARS:
        return [line]
    return [line[begin : begin + MAX_LINE_CHARS] for begin in range(0, len(line), MAX_LINE_CHARS)]
