"""The log of a script: what it wrote, as it came, an object a line.

A record is what one read gave: some bytes of one stream, which may begin or end within a line or a character. So
nothing waits in memory, and a line may be as long as it likes. Bytes that are not UTF-8 stand as lone surrogates
(Python's ``surrogateescape``), from which they can be had back.
"""

from __future__ import annotations

import json
import os
import struct
import time
from contextlib import suppress
from mmap import mmap

CHUNK = 64 * 1024
"""Bytes that a record holds at most."""
STREAMS = ("stdout", "stderr")
_HELD = 16 * 1024 * 1024
_HEAD = struct.Struct("=qdq")


def record(stream: int, moment: float, data: bytes) -> bytes:
    """The line that says that ``data`` came on a stream."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        body = json.dumps(text, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        body = json.dumps(text).encode()
    return b'{"time":%.6f,"stream":"%s","data":%s}\n' % (moment, STREAMS[stream].encode(), body)


class Flight:
    """What was read from a pipe and is not in the log yet, in memory that outlives the process that read it."""

    def __init__(self) -> None:
        self._shared = mmap(-1, _HEAD.size + CHUNK)
        self._data = memoryview(self._shared)[_HEAD.size :]

    def read(self, fd: int, stream: int) -> bytes:
        """Read a pipe; empty at its end."""
        moment = time.time()
        size = os.readv(fd, [self._data])
        _HEAD.pack_into(self._shared, 0, size, moment, stream)
        return record(stream, moment, self._data[:size].tobytes()) if size else b""

    def landed(self) -> None:
        """What was read is safe."""
        _HEAD.pack_into(self._shared, 0, 0, 0.0, 0)

    def left(self) -> bytes:
        """The record that had not landed."""
        size, moment, stream = _HEAD.unpack_from(self._shared, 0)
        return record(stream, moment, self._data[:size].tobytes()) if size else b""


class Log:
    """The file, written by one process at a time.

    While the disk is full the script goes on: records wait, and when there are too many the newest are dropped.

    Attributes:
        lost: bytes of records that were dropped.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._waiting: list[bytes] = []
        self._size = 0
        self.lost = 0

    @property
    def waits(self) -> bool:
        """Whether records wait for room on the disk."""
        return bool(self._waiting)

    def add(self, line: bytes) -> None:
        """Append a record."""
        if self._size + len(line) > _HELD and not self.flush():
            self.lost += len(line)
            return
        self._waiting.append(line)
        self._size += len(line)
        self.flush()

    def flush(self) -> bool:
        """Write what waits; False if that fails."""
        try:
            while self._waiting:
                written = os.write(self._fd, self._waiting[0])
                self._size -= written
                rest = self._waiting[0][written:]
                self._waiting[:1] = [rest] if rest else []
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Write what waits, make it durable, and let go."""
        if not self.flush():
            self.lost += self._size
        with suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)

    def mend(self, line: bytes) -> None:
        """After the death of another writer: see to it that ``line`` stands at the end, once, and no torn one."""
        size = os.fstat(self._fd).st_size
        room = len(line) + CHUNK * 7
        tail = os.pread(self._fd, room, max(size - room, 0))
        torn = len(tail) - (tail.rfind(b"\n") + 1)
        if torn:
            os.ftruncate(self._fd, size - torn)
            tail = tail[:-torn]
        if line and not tail.endswith(line):
            self.add(line)
