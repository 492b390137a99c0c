"""The wire: what one message between two ranks looks like, and how a byte stream is cut back into messages.

A frame is a head, the name of its lane (or topic), a table of segment lengths, and the segments::

    magic u16, kind u8, op u8, name length u16, rank u32, number u64, segments u32, name, u64 x segments, bytes…

Zeros before a segment bring it to a multiple of ``ALIGNMENT`` from where the first one begins.
A table entry with its top bit set is a segment that is not in the stream: it lies in a memory file whose descriptor
came with the first byte of the frame (only between processes of one machine; :mod:`det_core.ipc._serialization`).
What the segments hold is up to the kind: a pickle and its buffers, or JSON where the peer is not trusted yet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

IN_MEMORY_FILE = 1 << 63
"""Marks a segment that travels as a memory file."""
UNTRUSTED_LIMIT = 1 << 16
"""Bytes a frame may have before its sender is known."""
ALIGNMENT = 16
"""Bytes of whose multiples each segment begins at one, as malloc's memory does: an array in it is not misaligned."""
_MAGIC = 0xDE7C
_HEAD = struct.Struct("<HBBHIQI")
_LENGTH = struct.Struct("<Q")
_MAX_NAME = 512
_MAX_SEGMENTS = 1 << 22
_CHUNK = 1 << 16

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame is for."""

    CHALLENGE = 1  # chief -> stranger: a nonce
    HELLO = 2  # stranger -> chief: who I am
    WELCOME = 3  # chief -> worker: you are in; wait for READY
    REFUSED = 4  # chief -> stranger: why not, and whether to try again
    READY = 5  # chief -> worker: every rank is in
    CALL = 6  # a collective's item (to the chief) or result (from the chief)
    ENTERED = 7  # worker -> chief: I wait in this call
    POST = 8  # a message for a topic's subscribers
    CREDIT = 9  # so many bytes of yours have been used up
    ABORT = 10  # the job is broken or over: why
    EXITING = 11  # the process exits without having closed
    GOODBYE = 12  # this rank closes
    ACK = 13  # your trouble, leaving or goodbye has arrived, and so has all before it
    DEPARTED = 14  # chief -> workers: ranks that said goodbye
    ASK = 15  # worker -> chief: whom does this call wait for?
    ANSWER = 16  # chief -> worker: those
    LIFELINE = 17  # stranger -> chief: this connection, which carries nothing else, is the second one of a worker


class Op(IntEnum):
    """The collectives."""

    NONE = 0
    gather = 1
    allgather = 2
    broadcast = 3
    barrier = 4


class Call(NamedTuple):
    """One collective call of one rank: the ``number``-th on its lane.

    ``label`` is what the script calls it; only the rank itself knows that.
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
    """One message, as it arrived.

    Attributes:
        segments: buffers, or memory files (:class:`det_core.ipc._serialization.MemoryFile`).
        owed: bytes the receiver credits to the sender once it has used this frame up.
    """

    __slots__ = ("kind", "name", "number", "op", "owed", "rank", "segments")

    def __init__(self, kind: int, op: int, name: str, rank: int, number: int) -> None:
        self.kind = kind
        self.op = op
        self.name = name
        self.rank = rank
        self.number = number
        self.segments: Sequence[Any] = ()
        self.owed = 0


# encoding


def encode_head(
    kind: int, *, op: int = 0, name: str = "", rank: int = 0, number: int = 0, lengths: Sequence[int] = ()
) -> bytes:
    """The head, name and segment table of a frame; the bytes of the segments follow it."""
    label = name.encode()
    if len(label) > _MAX_NAME:
        raise ValueError(f"channel or topic name {name[:60]!r}… of {len(label)} bytes: expected {_MAX_NAME} at most")
    head = _HEAD.pack(_MAGIC, kind, op, len(label), rank, number, len(lengths))
    return head + label + struct.pack(f"<{len(lengths)}Q", *lengths)


def encode(
    kind: int, *, op: int = 0, name: str = "", rank: int = 0, number: int = 0, body: bytes | None = None
) -> bytes:
    """A whole small frame with one segment (or none) as one run of bytes."""
    lengths = () if body is None else (len(body),)
    return encode_head(kind, op=op, name=name, rank=rank, number=number, lengths=lengths) + (body or b"")


class SmallFrameEncoder:
    """Encodes the small calls of one lane, of one segment each: what most calls are."""

    def __init__(self, name: str, rank: int) -> None:
        self._label, self._rank = name.encode(), rank
        self._struct = struct.Struct(f"{_HEAD.format}{len(self._label)}sQ")

    def encode(self, op: int, number: int, body: bytes) -> bytes:
        """As :func:`encode`, for a CALL."""
        label = self._label
        return self._struct.pack(_MAGIC, Kind.CALL, op, len(label), self._rank, number, 1, label, len(body)) + body


# decoding


def decode_head(data: memoryview, limit: int | None = None) -> tuple[Frame, tuple[int, ...], int] | None:
    """Decode the head at the start of ``data``; None when it is not all there yet.

    Returns:
        The frame, still without its segments; the table of their lengths; and where their bytes begin.

    Raises:
        BadFrame: these are not our bytes, or the frame is larger than ``limit``.
    """
    if len(data) < _HEAD.size:
        return None
    magic, kind, op, name_length, rank, number, segments = _HEAD.unpack_from(data)
    if magic != _MAGIC or name_length > _MAX_NAME or segments > _MAX_SEGMENTS:
        raise BadFrame(f"not a frame: {bytes(data[:16])!r}")
    table = _HEAD.size + name_length
    end = table + 8 * segments
    if limit is not None and end > limit:
        raise BadFrame(f"a head of {end} bytes before the peer is known")
    if len(data) < end:
        return None
    lengths = struct.unpack_from(f"<{segments}Q", data, table)
    if limit is not None and sum(lengths) > limit:
        raise BadFrame(f"a frame of {sum(lengths)} bytes before the peer is known")
    try:
        name = str(data[_HEAD.size : table], "utf-8")
    except UnicodeDecodeError as e:
        raise BadFrame("a name that is not UTF-8") from e
    return Frame(kind, op, name, rank, number), lengths, end


def inline_bytes(lengths: Sequence[int]) -> int:
    """Return how many of a frame's bytes follow its head in the stream, those that align its segments among them."""
    end = 0
    for length in lengths:
        if not length & IN_MEMORY_FILE:
            end += -end % ALIGNMENT + length
    return end


Cut = tuple[Frame, tuple[int, ...], bytearray]
"""A whole frame, the table of its segments' lengths, and those of their bytes that are in the stream, in one run."""


class FrameDecoder:
    """Cuts a byte stream into frames. Pure: bytes in, frames out.

    ``buffer()`` gives the memory that the next bytes go to (so that a large frame is received in place, not copied),
    ``received(n)`` says how many arrived and returns the frames that are now whole.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._chunk = bytearray(_CHUNK)
        self._view = memoryview(self._chunk)
        self._start = 0
        self._end = 0
        self._large: Cut | None = None
        """The frame whose bytes go straight to where they stay."""
        self._have = 0

    def buffer(self) -> memoryview:
        """Where to put the next bytes (never empty)."""
        if self._large is not None:
            return memoryview(self._large[2])[self._have :]
        if self._end == len(self._chunk):
            rest = bytes(self._view[self._start : self._end])
            if len(rest) == len(self._chunk):  # a head (many segments) larger than the chunk
                self._chunk = bytearray(2 * len(rest))
                self._view = memoryview(self._chunk)
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._view[self._end :]

    def received(self, n: int) -> list[Cut]:
        """``n`` bytes are now in ``buffer()``: the frames this completes."""
        if self._large is not None:
            self._have += n
            if self._have < len(self._large[2]):
                return []
            large, self._large = self._large, None
            return [large]
        if self._end == 0 and (whole := self._whole(n)) is not None:
            return [whole]
        self._end += n
        found: list[Cut] = []
        while self._start < self._end:
            data = self._view[self._start : self._end]
            head = decode_head(data, self.limit)
            if head is None:
                return found
            frame, lengths, begin = head
            body = bytearray(inline_bytes(lengths))
            got = data[begin : begin + len(body)]
            body[: len(got)] = got
            if len(got) < len(body):
                self._large, self._have = (frame, lengths, body), len(got)
                break
            found.append((frame, lengths, body))
            self._start += begin + len(body)
        self._start = self._end = 0
        return found

    def _whole(self, n: int) -> Cut | None:
        """The common case, quickly: the ``n`` bytes at the start of the chunk are one frame of one segment."""
        if n < _HEAD.size + _LENGTH.size:
            return None
        magic, kind, op, name_length, rank, number, segments = _HEAD.unpack_from(self._chunk)
        body = _HEAD.size + name_length + _LENGTH.size
        if magic != _MAGIC or segments != 1 or name_length > _MAX_NAME or body > n:
            return None
        (length,) = _LENGTH.unpack_from(self._chunk, body - _LENGTH.size)
        if body + length != n:
            return None
        name = self._chunk[_HEAD.size : body - _LENGTH.size].decode("utf-8", "replace")
        return Frame(kind, op, name, rank, number), (length,), self._chunk[body:n]
