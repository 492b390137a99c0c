"""One TensorBoard event file: the messages that TensorBoard reads, in TensorFlow's TFRecord format.

Written here, as the packages that write such files also import the clients of object stores, or torch, which costs a
quarter of a second and more, and 10 µs a report. The two modules of tensorboard that are imported need protobuf alone.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from det_core._optional import require

try:
    from google_crc32c import value as _crc32c
except ImportError:  # tensorboard may be installed without our extra

    def _crc32c(data: bytes) -> int:
        # 4 µs an event instead of 0.2, in a thread that shares the interpreter with the training.
        crc = 0xFFFFFFFF
        for byte in data:
            crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ 0xFFFFFFFF


_PREFIX = "events.out.tfevents."
_TIME = re.compile(r"\d+(\.\d+)?")


class EventFile:
    """A file ``events.out.tfevents.<time>.<host>.<pid>``, which grows by whole events.

    Added events are kept in memory until :meth:`flush`, which may be called again after it has failed. Directory and
    file are created with the first event.
    """

    def __init__(self, folder: Path) -> None:
        event = require("tensorboard.compat.proto.event_pb2", extra="tensorboard", purpose="writing event files")
        summary = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard", purpose="writing event files")
        self._event = event.Event
        self._session = event.SessionLog
        self._summary = summary.Summary
        self._value = summary.Summary.Value
        # TensorBoard reads files in the order of their names, which is that of the times in them. A time in the future
        # comes from the clock of another machine.
        now = max([time.time(), *(created + 1e-6 for created in _creation_times(folder))])
        self.path = folder / f"{_PREFIX}{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._head = _record(event.Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        self._pending: list[bytes] = []
        self._size = 0
        self._fd: int | None = None

    def reset(self) -> None:
        """Start again with an empty file of the same name."""
        self.close()
        self._pending = []
        self._size = 0

    def add(self, wall_time: float, step: int, values: Sequence[tuple[str, float]]) -> None:
        """Add one point to each tag.

        Args:
            wall_time: seconds since the epoch.
            step: step of the points.
            values: tag and number of each point; the precision is that of a 32-bit float, as in TensorBoard.
        """
        points = [self._value(tag=tag, simple_value=number) for tag, number in values]
        self._add(self._event(wall_time=wall_time, step=step, summary=self._summary(value=points)))

    def add_session_start(self, step: int) -> None:
        """Add the mark at which TensorBoard drops the points of all tags from ``step`` on that it has read before."""
        start = self._session(status=self._session.START)
        self._add(self._event(wall_time=time.time(), step=step, session_log=start))

    def flush(self) -> None:
        """Write the added events to the disk.

        Raises:
            OSError: If the disk fails. The events since the last flush are kept for the next one.
        """
        if not self._pending:
            return
        head = b"" if self._size else self._head
        data = memoryview(b"".join([head, *self._pending]))
        written = 0
        try:
            if self._fd is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # A flush that failed may have left half a record.
            os.ftruncate(self._fd, self._size)
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._size + written)
            os.fsync(self._fd)
        except OSError:
            self.close()
            raise
        self._size += written
        self._pending.clear()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._size

    @property
    def size_after_flush(self) -> int:
        """Size of the file in bytes, once all added events are in it."""
        if not self._pending:
            return self._size
        head = 0 if self._size else len(self._head)
        return self._size + head + sum(map(len, self._pending))

    def was_deleted(self) -> bool:
        """Return whether the file was deleted."""
        return self._size > 0 and not self.path.exists()

    def close(self) -> None:
        """Close the file, until there is more to write."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _add(self, event: Any) -> None:
        self._pending.append(_record(event.SerializeToString()))


def _creation_times(folder: Path) -> list[float]:
    """Return the times at which the event files of a directory were created, as their names have them."""
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX)]
        return [float(match[0]) for name in names if (match := _TIME.match(name, len(_PREFIX)))]
    return []


def _record(data: bytes) -> bytes:
    """Return a TFRecord: length (64 bits), checksum of the length, data, checksum of the data; little-endian."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """Return TFRecord's checksum: a CRC-32C (RFC 3720, appendix B.4), rotated and with a constant added."""
    crc = _crc32c(data)
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
    return byte


_TABLE = tuple(map(_remainder, range(256)))
