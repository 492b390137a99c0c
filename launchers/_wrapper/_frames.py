"""Packets of many connections, one after the other on one stream of bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEAD = struct.Struct("!cIQ")

OPEN, MESSAGE, CLOSE, OUT, ERR, BEAT = b"o", b"m", b"c", b"1", b"2", b"b"
"""A connection begins, says something, ends; what ranks print; a sign of life."""


def frame(kind: bytes, connection: int = 0, content: bytes = b"") -> bytes:
    """One packet as bytes."""
    return _HEAD.pack(kind, connection, len(content)) + content


class Frames:
    """Takes a stream apart again."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
        """Take the next piece of the stream; give the packets that are whole now: kind, connection, content."""
        self._held += data
        start = 0
        while len(self._held) - start >= _HEAD.size:
            kind, connection, size = _HEAD.unpack_from(self._held, start)
            end = start + _HEAD.size + size
            if len(self._held) < end:
                break
            yield kind, connection, bytes(self._held[start + _HEAD.size : end])
            start = end
        del self._held[:start]
