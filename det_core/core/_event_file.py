"""One TensorBoard event file: the messages that TensorBoard reads, in TensorFlow's TFRecord format.

Written here, as the packages that write such files import the clients of object stores with it, or torch: a quarter of
a second and more, and 10 µs a report. The two modules of tensorboard that are imported need protobuf alone.
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
except ImportError:  # tensorboard may be there without our extra

    def _crc32c(data: bytes) -> int:
        """In Python: 4 µs an event instead of 0.2, in a thread that shares the interpreter with the training."""
        crc = 0xFFFFFFFF
        for byte in data:
            crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ 0xFFFFFFFF


_PREFIX = "events.out.tfevents."
_TIME = re.compile(r"\d+(\.\d+)?")


class EventFile:
    """A file ``events.out.tfevents.<time>.<host>.<pid>``, written in steps that are whole or not there.

    What was added waits in memory for :meth:`flush`, which may be tried again after it has failed. Folder and file are
    made with the first that there is to write.
    """

    def __init__(self, folder: Path) -> None:
        event = require("tensorboard.compat.proto.event_pb2", extra="tensorboard", purpose="writing event files")
        summary = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard", purpose="writing event files")
        self._event, self._session = event.Event, event.SessionLog
        self._summary, self._value = summary.Summary, summary.Summary.Value
        # TensorBoard reads files in the order of their names, so by the time at which they were begun; one whose begin
        # lies ahead is of another machine's clock.
        now = max([time.time(), *(begun + 1e-6 for begun in _begun(folder))])
        self.path = folder / f"{_PREFIX}{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._head = _record(event.Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        self._waiting: list[bytes] = []
        self._size = 0
        self._fd: int | None = None

    def reset(self) -> None:
        """Begin with an empty file, under the same name."""
        self.close()
        self._waiting, self._size = [], 0

    def add(self, wall_time: float, step: int, values: Sequence[tuple[str, float]]) -> None:
        """Add one point to each tag.

        Args:
            wall_time: seconds since the epoch.
            step: the step of the points.
            values: tag and number of each; kept with the precision of a 32-bit float, as TensorBoard does.
        """
        points = [self._value(tag=tag, simple_value=number) for tag, number in values]
        self._add(self._event(wall_time=wall_time, step=step, summary=self._summary(value=points)))

    def add_session_start(self, step: int) -> None:
        """Add the mark by which TensorBoard drops what it has read so far from ``step`` on, of all tags."""
        start = self._session(status=self._session.START)
        self._add(self._event(wall_time=time.time(), step=step, session_log=start))

    def flush(self) -> None:
        """Bring what was added to the disk.

        Raises:
            OSError: the disk refused. All that was added since the last flush waits for the next one.
        """
        if not self._waiting:
            return
        data, written = memoryview(b"".join([b"" if self._size else self._head, *self._waiting])), 0
        try:
            if self._fd is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._fd, self._size)  # a flush that failed may have left half a record
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._size + written)
            os.fsync(self._fd)
        except OSError:
            self.close()
            raise
        self._size += written
        self._waiting.clear()

    @property
    def size(self) -> int:
        """How large the file is."""
        return self._size

    @property
    def size_after_flush(self) -> int:
        """How large the file is once all that was added is in it."""
        if not self._waiting:
            return self._size
        head = 0 if self._size else len(self._head)
        return self._size + head + sum(map(len, self._waiting))

    def was_deleted(self) -> bool:
        """Whether somebody has deleted it."""
        return self._size > 0 and not self.path.exists()

    def close(self) -> None:
        """Let go of the file, until there is more to write."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _add(self, event: Any) -> None:
        self._waiting.append(_record(event.SerializeToString()))


def _begun(folder: Path) -> list[float]:
    """Return when the event files of a folder were begun, as their names have it."""
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX)]
        return [float(found[0]) for name in names if (found := _TIME.match(name, len(_PREFIX)))]
    return []


def _record(data: bytes) -> bytes:
    """A TFRecord: its length (64 bits), the length's checksum, the data and the data's checksum, little-endian."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """A CRC-32C (RFC 3720, appendix B.4), rotated and with a constant added."""
    crc = _crc32c(data)
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_remainder, range(256)))
