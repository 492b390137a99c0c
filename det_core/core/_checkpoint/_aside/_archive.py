"""The file that ``torch.load`` reads, laid out so that tensors can be copied straight to where they lie in it.

``torch.save`` writes a zip archive of stored (not compressed) records::

    archive/data/0 …    the bytes of each storage, at a multiple of 64
    archive/data.pkl    the pickle of everything else, in which storages are named by their numbers
    archive/byteorder   little or big
    archive/version     3

Here the pickle comes after the storages, whose places are then the same for each save of the same model. Formats: zip,
APPNOTE.TXT 6.3.10 (4.3.7 local headers, 4.3.12 central directory, 4.3.14 ZIP64, 4.3.16 end record).
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Generator, Sequence
from typing import NamedTuple

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # the same, at a fifteenth of the speed
    from zlib import crc32

ALIGNMENT = 64
LIMIT = 0xFFFFFFFF
PADDING = 0x4246
"""The tag of the field that torch pads headers with."""
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CHECK = struct.Struct("<I")
_LOCAL_CHECK, _CENTRAL_CHECK = 14, 16
"""Where in a header the checksum is."""
TURN = 1 << 20
"""Bytes that are checked between two turns."""
_DATE = (1980 - 1980) << 9 | 1 << 5 | 1
_FIXED = {"byteorder": sys.byteorder.encode(), "version": b"3\n"}


class Record(NamedTuple):
    """A record of the archive; places count from its beginning."""

    name: bytes
    header: int
    """Where its header begins."""
    start: int
    """Where its bytes begin."""
    size: int


class Archive:
    """Where what lies in a file with these storages, and later a pickle.

    Args:
        storages: bytes of each storage.
    """

    def __init__(self, storages: Sequence[int]) -> None:
        self.records: list[Record] = []
        self.end = 0
        """Where the last record ends, and so the bytes that memory for it must have."""
        for number, size in enumerate(storages):
            self._add(f"data/{number}", size)

    def with_pickle(self, size: int) -> Archive:
        """The whole archive, with a pickle of so many bytes, whose record is :attr:`pickle`."""
        whole = Archive(())
        whole.records, whole.end = list(self.records), self.end
        whole._add("data.pkl", size)
        for name, content in _FIXED.items():
            whole._add(name, len(content))
        return whole

    @property
    def pickle(self) -> Record:
        """The record of the pickle."""
        return self.records[-1 - len(_FIXED)]

    def _add(self, name: str, size: int) -> None:
        full = f"archive/{name}".encode()
        start = self.end + _LOCAL.size + len(full) + len(_long(size, size)) + 4
        start += -start % ALIGNMENT
        self.records.append(Record(full, self.end, start, size))
        self.end = start + size

    def seal(self, memory: memoryview) -> Generator[int, None, bytes]:
        """Write the headers, and the records that are always the same, around what was copied into ``memory``.

        Yields:
            0 now and then, so that others can have their turn.

        Returns:
            what follows ``memory[:end]`` in the file.
        """
        for record, content in zip(self.records[-len(_FIXED) :], _FIXED.values(), strict=True):
            memory[record.start : record.start + record.size] = content
        around, directory, end = self._around
        checked, pack = 0, _CHECK.pack
        for header, start, stop, before, after, place in around:
            check = pack(crc32(memory[start:stop]))
            memory[header:start] = before + check + after
            directory[place : place + 4] = check
            checked += stop - header
            if checked >= TURN:
                checked = 0
                yield 0
        return bytes(directory) + end

    @functools.cached_property
    def _around(self) -> tuple[list[tuple[int, int, int, bytes, bytes, int]], bytearray, bytes]:
        """What lies around the records, all but the checksums.

        Of each record the places of its header, of its bytes and of their end, what its header has before the checksum
        and after it, and where in the directory that belongs; then the directory, and what follows it.
        """
        around, directory = [], bytearray()
        for record in self.records:
            header = _local(record, 0)
            before, after = header[:_LOCAL_CHECK], header[_LOCAL_CHECK + 4 :]
            place = len(directory) + _CENTRAL_CHECK
            around.append((record.header, record.start, record.start + record.size, before, after, place))
            directory += _central(record, 0)
        return around, directory, _end(len(self.records), len(directory), self.end)


@functools.lru_cache(maxsize=2)
def archive_of(storages: tuple[int, ...], pickled: int) -> Archive:
    """The archive of these storages and a pickle of so many bytes; mostly the same as the last time."""
    return Archive(storages).with_pickle(pickled)


def _local(record: Record, check: int) -> bytes:
    extra = _long(record.size, record.size)
    pad = record.start - record.header - _LOCAL.size - len(record.name) - len(extra) - 4
    extra += struct.pack("<2H", PADDING, pad) + b"Z" * pad
    size = min(record.size, LIMIT)
    version = 45 if size == LIMIT else 20
    head = (version, 0, 0, 0, _DATE, check, size, size, len(record.name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *head) + record.name + extra


def _central(record: Record, check: int) -> bytes:
    extra = _long(record.size, record.size, record.header)
    size = min(record.size, LIMIT)
    version = 45 if extra else 20
    head = (version, version, 0, 0, 0, _DATE, check, size, size, len(record.name), len(extra), 0, 0, 0, 0)
    return _CENTRAL.pack(b"PK\x01\x02", *head, min(record.header, LIMIT)) + record.name + extra


def _long(*numbers: int) -> bytes:
    """The field for those of the numbers that four bytes cannot hold; nothing if there is none."""
    large = [n for n in numbers if n >= LIMIT]
    return struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""


def _end(count: int, size: int, start: int) -> bytes:
    """What closes the archive: the place of its directory."""
    end = _END.pack(b"PK\x05\x06", 0, 0, *[min(count, 0xFFFF)] * 2, min(size, LIMIT), min(start, LIMIT), 0)
    if count < 0xFFFF and size < LIMIT and start < LIMIT:
        return end
    long = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
    return long + _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1) + end
