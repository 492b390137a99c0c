"""The records of an event file: TensorFlow's TFRecord format.

A record is its length (64 bits), the length's checksum, the data, and the data's checksum (32 bits each, all
little-endian). The checksum is a CRC-32C (RFC 3720, appendix B.4), rotated and with a constant added. The packages that
write such files import the clients of object stores with it, or torch, which takes seconds.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

try:
    from google_crc32c import value as _crc32c
except ImportError:  # tensorboard may be there without our extra

    def _crc32c(data: bytes) -> int:
        """In Python: 4 µs an event instead of 0.2, in a thread that shares the interpreter with the training."""
        crc = 0xFFFFFFFF
        for byte in data:
            crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ 0xFFFFFFFF


class Records:
    """A new file of records; an existing one is emptied."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: bytes) -> None:
        """Append one record."""
        length = struct.pack("<Q", len(data))
        self._file.write(b"".join((length, _checksum(length), data, _checksum(data))))

    def flush(self) -> None:
        """Bring what was written to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; what was not flushed may be lost."""
        self._file.close()


def _checksum(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_remainder, range(256)))
