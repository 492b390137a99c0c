"""Wire format: the encoding of one message between two ranks, and the decoding of a byte stream into messages.

A frame is a head, the name of its channel (or topic), a table of segment lengths, and the segments::

    magic u16, kind u8, op u8, name length u16, rank u32, number u64, segments u32, name, u64 x segments, bytes…

Zeros before a segment align it to a multiple of ``ALIGNMENT`` from the start of the first one.
A table entry with its top bit set is a segment outside the stream: it lies in a memory file whose descriptor
came with the first byte of the frame (only between processes of one node; :mod:`det_core.ipc._serialization`).
The content of the segments depends on the kind: a pickle and its buffers, or JSON while the peer is not trusted yet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

IN_MEMORY_FILE = 1 << 63
"""Flag in the segment table for a segment that travels as a memory file."""
UNTRUSTED_LIMIT = 1 << 16
"""Maximum size in bytes of a frame from an unauthenticated sender."""
ALIGNMENT = 16
"""Alignment of each segment in bytes, that of malloc's memory: arrays in segments are not misaligned."""
_MAGIC = 0xDE7C
_HEAD = struct.Struct("<HBBHIQI")
_LENGTH = struct.Struct("<Q")
_MAX_NAME_BYTES = 512
_MAX_SEGMENTS = 1 << 22
_CHUNK_BYTES = 1 << 16

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Purpose of a frame."""

    CHALLENGE = 1  # chief -> unauthenticated: a nonce
    HELLO = 2  # unauthenticated -> chief: rank, size, job and proof of the sender
    WELCOME = 3  # chief -> worker: admitted; wait for READY
    REFUSED = 4  # chief -> unauthenticated: whether to retry, and why it was not admitted
    READY = 5  # chief -> worker: every rank is admitted
    CALL = 6  # a collective's item (to the chief) or result (from the chief)
    ENTERED = 7  # worker -> chief: the sender waits in this call
    POST = 8  # a message for a topic's subscribers
    CREDIT = 9  # the receiver of this may send that many bytes more
    ABORT = 10  # the job is broken or over: the reason
    EXITING = 11  # the process exits without having closed
    GOODBYE = 12  # orderly close, with exit info
    ACK = 13  # an ABORT, EXITING or GOODBYE has arrived, and so has all before it
    DEPARTED = 14  # chief -> workers: ranks that closed in order
    ASK = 15  # worker -> chief: which ranks does this call wait for?
    ANSWER = 16  # chief -> worker: those ranks
    LIFELINE = 17  # unauthenticated -> chief: second connection of a worker, which carries nothing else


class Op(IntEnum):
    """Collective operation."""

    NONE = 0
    gather = 1
    allgather = 2
    broadcast = 3
    barrier = 4


class Call(NamedTuple):
    """One collective call of one rank: the ``number``-th on its channel.

    ``label`` is the script's name for it, known to the calling rank alone.
    """

    channel: str
    op: Op
    number: int
    label: str = ""

    def __str__(self) -> str:
        channel = "" if self.channel == "user" else f" on channel {self.channel!r}"
        label = f" {self.label!r}" if self.label else ""
        return f"{self.op.name}{label} (call {self.number}{channel})"


class BadFrame(Exception):
    """Bytes that no det_core process writes."""


class Frame:
    """One received message.

    Attributes:
        segments: buffers, or memory files (:class:`det_core.ipc._serialization.MemoryFile`).
        credit: bytes that the receiver credits to the sender once it has consumed this frame.
    """

    __slots__ = ("credit", "kind", "name", "number", "op", "rank", "segments")

    def __init__(self, kind: int, op: int, name: str, rank: int, number: int) -> None:
        self.kind = kind
        self.op = op
        self.name = name
        self.rank = rank
        self.number = number
        self.segments: Sequence[Any] = ()
        self.credit = 0


# encoding


def encode_head(
    kind: int, *, op: int = 0, name: str = "", rank: int = 0, number: int = 0, lengths: Sequence[int] = ()
) -> bytes:
    """Return the head, name and segment table of a frame; the bytes of the segments follow it.

    Raises:
        ValueError: If the name is too long.
    """
    label = name.encode()
    if len(label) > _MAX_NAME_BYTES:
        raise ValueError(
            f"channel or topic name {name[:60]!r}… has {len(label)} bytes: expected at most {_MAX_NAME_BYTES}"
        )
    head = _HEAD.pack(_MAGIC, kind, op, len(label), rank, number, len(lengths))
    return head + label + struct.pack(f"<{len(lengths)}Q", *lengths)


def encode(
    kind: int, *, op: int = 0, name: str = "", rank: int = 0, number: int = 0, body: bytes | None = None
) -> bytes:
    """Return a whole small frame with one segment (or none) as one run of bytes."""
    if body is None:
        return encode_head(kind, op=op, name=name, rank=rank, number=number)
    return encode_head(kind, op=op, name=name, rank=rank, number=number, lengths=(len(body),)) + body


class SmallFrameEncoder:
    """Encoder of small calls on one channel, with one segment each: most calls are of this form."""

    def __init__(self, name: str, rank: int) -> None:
        self._label = name.encode()
        self._rank = rank
        self._struct = struct.Struct(f"{_HEAD.format}{len(self._label)}sQ")

    def encode(self, op: int, number: int, body: bytes) -> bytes:
        """Return a CALL frame, as :func:`encode` does."""
        label = self._label
        return self._struct.pack(_MAGIC, Kind.CALL, op, len(label), self._rank, number, 1, label, len(body)) + body


# decoding


def decode_head(data: memoryview, limit: int | None = None) -> tuple[Frame, tuple[int, ...], int] | None:
    """Decode the head at the start of ``data``; return None while it is incomplete.

    Returns:
        The frame, still without its segments; the table of their lengths; and the offset of their bytes.

    Raises:
        BadFrame: If the bytes are not a det_core frame, or the frame is larger than ``limit``.
    """
    if len(data) < _HEAD.size:
        return None
    magic, kind, op, name_length, rank, number, segments = _HEAD.unpack_from(data)
    if magic != _MAGIC or name_length > _MAX_NAME_BYTES or segments > _MAX_SEGMENTS:
        raise BadFrame(f"not a frame: {bytes(data[:16])!r}")
    table = _HEAD.size + name_length
    end = table + 8 * segments
    # Before the rest has arrived: an unauthenticated peer must not make this process keep 32 MB of table.
    if limit is not None and end > limit:
        raise BadFrame(f"head of {end} bytes from an unauthenticated peer")
    if len(data) < end:
        return None
    lengths = struct.unpack_from(f"<{segments}Q", data, table)
    if limit is not None and sum(lengths) > limit:
        raise BadFrame(f"frame of {sum(lengths)} bytes from an unauthenticated peer")
    try:
        name = str(data[_HEAD.size : table], "utf-8")
    except UnicodeDecodeError as e:
        raise BadFrame("name is not UTF-8") from e
    return Frame(kind, op, name, rank, number), lengths, end


def inline_bytes(lengths: Sequence[int]) -> int:
    """Return how many of a frame's bytes follow its head in the stream, including alignment."""
    end = 0
    for length in lengths:
        if not length & IN_MEMORY_FILE:
            end += -end % ALIGNMENT + length
    return end


RawFrame = tuple[Frame, tuple[int, ...], bytearray]
"""A whole frame, the table of its segments' lengths, and their bytes in the stream as one run."""


class FrameDecoder:
    """Decoder of a byte stream. Pure: bytes in, frames out.

    ``buffer()`` gives the memory for the next bytes (so that a large frame is received in place, not copied),
    ``received(n)`` takes the number of bytes that arrived there and returns the frames that are now whole.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._chunk = bytearray(_CHUNK_BYTES)
        self._view = memoryview(self._chunk)
        self._start = 0
        self._end = 0
        self._large: RawFrame | None = None
        """The frame whose bytes are received straight into their final memory."""
        self._large_received = 0

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes, never empty."""
        if self._large is not None:
            return memoryview(self._large[2])[self._large_received :]
        if self._end == len(self._chunk):
            rest = bytes(self._view[self._start : self._end])
            # A head with many segments may be larger than the chunk; compaction alone would return an empty buffer.
            if len(rest) == len(self._chunk):
                self._chunk = bytearray(2 * len(rest))
                self._view = memoryview(self._chunk)
            self._view[: len(rest)] = rest
            self._start = 0
            self._end = len(rest)
        return self._view[self._end :]

    def received(self, n: int) -> list[RawFrame]:
        """Return the frames that the ``n`` bytes now in ``buffer()`` complete."""
        if self._large is not None:
            self._large_received += n
            if self._large_received < len(self._large[2]):
                return []
            large = self._large
            self._large = None
            return [large]
        if self._end == 0 and (single := self._decode_single(n)) is not None:
            return [single]
        self._end += n
        complete: list[RawFrame] = []
        while self._start < self._end:
            data = self._view[self._start : self._end]
            head = decode_head(data, self.limit)
            if head is None:
                return complete
            frame, lengths, begin = head
            body = bytearray(inline_bytes(lengths))
            arrived = data[begin : begin + len(body)]
            body[: len(arrived)] = arrived
            if len(arrived) < len(body):
                self._large = (frame, lengths, body)
                self._large_received = len(arrived)
                break
            complete.append((frame, lengths, body))
            self._start += begin + len(body)
        self._start = 0
        self._end = 0
        return complete

    def _decode_single(self, n: int) -> RawFrame | None:
        """Return the frame if the ``n`` bytes of the chunk are exactly one, with one segment: the fast path."""
        if n < _HEAD.size + _LENGTH.size:
            return None
        magic, kind, op, name_length, rank, number, segments = _HEAD.unpack_from(self._chunk)
        body = _HEAD.size + name_length + _LENGTH.size
        if magic != _MAGIC or segments != 1 or name_length > _MAX_NAME_BYTES or body > n:
            return None
        # The limit needs no check here: the chunk is not larger than UNTRUSTED_LIMIT.
        (length,) = _LENGTH.unpack_from(self._chunk, body - _LENGTH.size)
        if body + length != n:
            return None
        name = self._chunk[_HEAD.size : body - _LENGTH.size].decode("utf-8", "replace")
        return Frame(kind, op, name, rank, number), (length,), self._chunk[body:n]
