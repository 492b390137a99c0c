"""A prefix for every line, whatever the bytes are, without looking at single lines."""

from __future__ import annotations

LONGEST_LINE = 64 * 1024 * 1024
"""Bytes after which a line that does not end is cut, so that memory stays bounded."""


class Prefixer:
    """Puts a prefix before every line of a stream of bytes.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r`` (progress bars). On a terminal the ``\\r`` stays, so that a bar
    is drawn over itself; elsewhere it becomes ``\\n``, so that each state of the bar is a line of the log. A ``\\r``
    at the start of a line, where it does nothing, is dropped.

    Args:
        prefix: not empty, and holds neither ``\\n`` nor ``\\r``.
        terminal: whether the output is a terminal.
    """

    def __init__(self, prefix: bytes, *, terminal: bool = False) -> None:
        self._prefix = prefix
        self._terminal = terminal
        self._begun: list[bytes] = []  # the pieces of a line that has not ended
        self._begun_size = 0
        self._held = b""  # a \r at the end of a piece: the next byte says what it is

    def feed(self, data: bytes) -> bytes:
        """Take the next piece of the stream; return the lines that are now whole, with their prefixes."""
        if self._held or b"\r" in data:
            data = self._returns(data)
        cut = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if cut < 0:
            if data:
                self._begun.append(data)
            self._begun_size += len(data)
            return self.flush() if self._begun_size > LONGEST_LINE else b""
        lines = b"".join([*self._begun, data[: cut + 1]]).replace(b"\n", b"\n" + self._prefix)
        if self._terminal and b"\r" in lines:
            parts = (part.replace(b"\r", b"\r" + self._prefix) for part in lines.split(b"\r\n"))
            lines = b"\r\n".join(parts)
        self._begun = [data[cut + 1 :]] if cut + 1 < len(data) else []
        self._begun_size = len(data) - cut - 1
        return self._prefix + lines[: -len(self._prefix)]

    def flush(self) -> bytes:
        """End the line that has begun, if there is one, and return it."""
        line = b"".join(self._begun)
        self._begun, self._begun_size, self._held = [], 0, b""
        return b"".join((self._prefix, line, b"\n")) if line else b""

    def _returns(self, data: bytes) -> bytes:
        """``data`` without idle ``\\r``, and off a terminal with ``\\n`` for each that ends a line."""
        data = self._held + data
        rest = data.rstrip(b"\r")
        self._held = b"\r" if len(rest) < len(data) else b""  # several in a row do what one does
        data = rest
        parts = data.split(b"\r\n")
        for i, part in enumerate(parts):
            if i or not self._begun:
                part = part.lstrip(b"\r")
            if i < len(parts) - 1:
                part = part.rstrip(b"\r")
            while b"\r\r" in part:
                part = part.replace(b"\r\r", b"\r")
            part = part.replace(b"\n\r", b"\n")
            parts[i] = part if self._terminal else part.replace(b"\r", b"\n")
        return b"\r\n".join(parts)
