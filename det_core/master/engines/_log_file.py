"""The log of one node and writer, read from any offset in either direction."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from det_core.master.engines._supervisor._log import find_segments, segment_name

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
BLOCK_BYTES = 128 * 1024
MIN_TIME = -62_135_596_800
"""Year 1, which a script may send."""
MAX_TIME = 253_402_300_799
MAX_RECORD_BYTES = 1 << 20
"""Bytes without a line end after which they are taken for damage: a line of a supervisor has about 64 KiB."""
_LAST_BYTES = 256 * 1024
LogKey = tuple[int, str]
"""Node and writer."""
_NOT_A_SEGMENT = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ELOOP)
_TIME = rb"^([0-9]{1,11}\.[0-9]{6}) "
_JSON = re.compile(_TIME + rb"j (.*)\n", re.MULTILINE)
_HEAD = re.compile(_TIME, re.MULTILINE)


class LogLine(NamedTuple):
    """One line of a log.

    Attributes:
        time: Seconds since the epoch.
        stream: ``stdout`` or ``stderr``.
        rank: From a leading ``[rank=N] ``; None without one.
        level: From a leading ``LEVEL: ``, one of :data:`LEVELS`; None without one. Lines that were sent have any word.
        text: The rest, without its line end. A very long line comes in several.
        source: ``task``, ``master`` or ``alert``, or any word for lines that were sent.
        allocation_id: What a line that was sent says of its allocation.
        end: Line end; empty for one that was sent without it.
    """

    time: float
    stream: str
    rank: int | None
    level: str | None
    text: str
    source: str = "task"
    allocation_id: str | None = None
    end: str = "\n"

    def to_json(self) -> bytes:
        """Return it as it is written by the master."""
        return orjson.dumps({key: _clean(value) for key, value in self._asdict().items() if value is not None})

    @classmethod
    def from_json(cls, data: bytes) -> LogLine:
        """Return a line that was written by the master.

        Raises:
            ValueError: If it was not.
        """
        fields = orjson.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        values: Any = [fields.get(name, cls._field_defaults.get(name)) for name in cls._fields]
        line = cls(*values)
        words = (line.stream, line.text, line.source, line.end, line.level or "", line.allocation_id or "")
        is_time = type(line.time) in (int, float) and MIN_TIME <= line.time <= MAX_TIME
        if not is_time or type(line.rank) not in (int, type(None)) or not all(type(word) is str for word in words):
            raise ValueError("not a line")
        return line


@dataclass(frozen=True)
class LineFilter:
    """Choice of lines.

    Attributes:
        min_level: Lowest level, one of :data:`LEVELS`; lines without a level are INFO. None: any.
        rank: Rank that a line begins with; None: any, or none.
    """

    min_level: str | None = None
    rank: int | None = None

    @cached_property
    def pattern(self) -> re.Pattern[bytes]:
        """Pattern of the lines of a supervisor that are chosen: time, kind, rank, level and text.

        It does what :meth:`accepts` does without a look at each of the others.
        """
        rank = rb"(?:\[rank=([0-9]{1,9})\] )?"
        before = b""
        if self.rank is not None:
            rank = rb"\[rank=(%d)\] " % self.rank
        wanted = LEVELS[LEVELS.index(self.min_level) :] if self.min_level else LEVELS
        level = rb"(%s): " % "|".join(wanted).encode()
        if "INFO" in wanted:
            level = b"(?:" + level + b")?"
            if lower := LEVELS[: -len(wanted)]:
                before = rb"(?!(?:\[rank=[0-9]{1,9}\] )?(?:%s): )" % "|".join(lower).encode()
        return re.compile(_TIME + b"([oe]) " + before + rank + level + rb"(.*)\n", re.MULTILINE)

    def accepts(self, line: LogLine) -> bool:
        """Return whether a line is chosen."""
        if self.rank is not None and line.rank != self.rank:
            return False
        if self.min_level is None:
            return True
        level = line.level if line.level in LEVELS else "INFO"
        return LEVELS.index(level) >= LEVELS.index(self.min_level)


EVERY_LINE = LineFilter()


class Entry(NamedTuple):
    """A line with its place.

    Attributes:
        time: When it was written, by which logs are merged.
        begin: Offset of its first byte.
        end: Offset of what follows.
        line: The line.
    """

    time: float
    begin: int
    end: int
    line: LogLine


class BudgetUsed(Exception):
    """A read has looked at as many bytes as it may; what it has not yielded may still follow."""


@dataclass
class Budget:
    """Bytes that a read may still look at.

    Attributes:
        left: How many; 0 or less once they are used up.
    """

    left: int

    def check(self) -> None:
        """Raise :exc:`BudgetUsed` if it is used up."""
        if self.left <= 0:
            raise BudgetUsed


class LogFile:
    """Segments of one log. A segment that is deleted while it is read is a gap like any other.

    Args:
        directory: The ``log`` directory of an allocation.
        node: Rank of the node.
        writer: One of the writers.
        starts: Starts of its segments, in order.
    """

    def __init__(self, directory: Path, node: int, writer: str, starts: list[int]) -> None:
        self.key = (node, writer)
        self._directory = directory
        self._segments = list(zip(starts, [*starts[1:], None], strict=True))

    @classmethod
    def find(cls, directory: Path) -> list[LogFile]:
        """Return all logs in a directory, by node and writer."""
        return [cls(directory, *key, starts) for key, starts in sorted(find_segments(str(directory)).items())]

    @property
    def length(self) -> int:
        """Bytes written so far."""
        start, _ = self._segments[-1]
        with self._open(start) as segment:
            return start + segment.size

    def after(self, offset: int) -> int:
        """Return the offset of what follows the line, or the note of a gap, that begins at an offset."""
        for start, following in self._segments:
            with self._open(start) as segment:
                end = start + segment.size
                if start <= offset < end:
                    data = segment.read(offset - start, MAX_RECORD_BYTES)
                    return offset + (data.find(b"\n") + 1 or len(data))
                if offset == end and following is not None and following > end:
                    return following
        return offset

    def forward(self, offset: int, choice: LineFilter, budget: Budget, passed: dict[LogKey, int]) -> Iterator[Entry]:
        """Yield the chosen lines from an offset on, up to the last whole one.

        Args:
            offset: Where a line begins.
            choice: Lines to yield.
            budget: Taken from for each block.
            passed: Gets, at the log's key, the offset up to which nothing is left to yield.

        Raises:
            BudgetUsed: If there is a further block, and the budget is used up.
        """
        has_read = False
        for start, following in self._segments:
            if following is not None and following <= offset:
                continue
            if start > offset:
                yield self._gap(offset, start)
                offset = start
            with self._open(start) as segment:
                while block := segment.lines_from(offset - start):
                    if has_read:  # the first block is free, so that each read comes further
                        budget.check()
                    has_read = True
                    budget.left -= len(block)
                    yield from self._entries(block, offset, choice)
                    offset += len(block)
                    passed[self.key] = offset
                if following == start + segment.size:
                    offset = following  # beyond a line that was torn by a kill

    def backward(self, offset: int, choice: LineFilter, budget: Budget, passed: dict[LogKey, int]) -> Iterator[Entry]:
        """Yield the chosen lines before an offset, the last one first; see :meth:`forward`."""
        has_read = False
        for start, following in reversed(self._segments):
            if start >= offset:
                continue
            with self._open(start) as segment:
                if following is not None and start + segment.size < following <= offset:
                    yield self._gap(start + segment.size, following)
                offset = min(offset, start + segment.size)
                while block := segment.lines_before(offset - start):
                    if has_read:  # the first block is free, so that each read comes further
                        budget.check()
                    has_read = True
                    budget.left -= len(block)
                    offset -= len(block)
                    yield from self._entries(block, offset, choice, is_backward=True)
                    passed[self.key] = offset
            offset = start

    def offset_at(self, time: float) -> int:
        """Return the offset of the first line that was written at a time or later."""
        for start, _ in reversed(self._segments):
            if (first := self._time_at(start)) is None or first >= time:
                continue
            with self._open(start) as segment:
                low = 0
                high = segment.size
                while high - low > 2 * BLOCK_BYTES:
                    middle = (low + high) // 2
                    found = _HEAD.search(segment.read(middle, BLOCK_BYTES), 1)
                    if found is None or float(found[1]) >= time:
                        high = middle
                    else:
                        low = middle + found.start()
                while block := segment.lines_from(low):
                    for found in _HEAD.finditer(block):
                        if float(found[1]) >= time:
                            return start + low + found.start()
                    low += len(block)
                return start + low
        return self._segments[0][0]

    def _entries(self, block: bytes, offset: int, choice: LineFilter, *, is_backward: bool = False) -> Iterator[Entry]:
        """Yield the chosen ones of the lines in a block that begins at an offset."""
        is_output = self.key[1] == "supervisor"
        matches: Iterable[re.Match[bytes]] = (choice.pattern if is_output else _JSON).finditer(block)
        if is_backward:
            matches = reversed(list(matches))  # of which most are not looked at: the last lines are wanted
        for match in matches:
            with suppress(ValueError):
                line = _from_match(match) if is_output else LogLine.from_json(match[2])
                if is_output or choice.accepts(line):
                    yield Entry(float(match[1]), offset + match.start(), offset + match.end(), line)

    def _gap(self, begin: int, end: int) -> Entry:
        """Return a note in the place of segments that were deleted."""
        time = self._time_at(end) or 0.0
        text = f"{end - begin} bytes of this log were deleted here, as its first and its last lines are kept"
        return Entry(time, begin, end, LogLine(time, "stderr", None, "WARNING", text, source="master"))

    def _time_at(self, start: int) -> float | None:
        """Return the time of the first line of a segment."""
        with self._open(start) as segment:
            found = _HEAD.search(segment.read(0, BLOCK_BYTES))
        return float(found[1]) if found is not None else None

    @contextmanager
    def _open(self, start: int) -> Iterator[_Segment]:
        path = self._directory / segment_name(*self.key, start)
        try:
            # A script may have put a FIFO here, at which a plain open() waits.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in _NOT_A_SEGMENT:
                raise
            yield _Segment(None)
            return
        try:
            yield _Segment(fd if stat.S_ISREG(os.fstat(fd).st_mode) else None)
        finally:
            os.close(fd)


class _Segment:
    """Open file of a segment; None stands for one that is not there any more, which is empty."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self.size = 0 if fd is None else os.fstat(fd).st_size

    def read(self, at: int, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        return b"" if self._fd is None else os.pread(self._fd, size, at)

    def lines_from(self, at: int) -> bytes:
        """Return a block of whole lines; empty if none follows, or the last one has not ended."""
        for size in (BLOCK_BYTES, MAX_RECORD_BYTES):
            data = self.read(at, size)
            whole = data[: data.rfind(b"\n") + 1]
            if whole or len(data) < size:
                return whole
        return data

    def lines_before(self, at: int) -> bytes:
        """Return a block of lines that ends at an offset; of a line that has not ended, what there is of it."""
        for size in (BLOCK_BYTES // 4, MAX_RECORD_BYTES):
            begin = max(at - size, 0)
            data = self.read(begin, at - begin)
            first = data.find(b"\n") + 1
            if begin == 0:
                return data
            if 0 < first < len(data):
                return data[first:]
        return data


def _clean(value: object) -> object:
    """Return a text without halves of surrogate pairs, which UTF-8 has no bytes for."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _from_match(match: re.Match[bytes]) -> LogLine:
    _, kind, rank, level, text = match.groups()
    return LogLine(
        time=float(match[1]),
        stream="stderr" if kind == b"e" else "stdout",
        rank=None if rank is None else int(rank),
        level=None if level is None else level.decode(),
        # Terminals and databases of readers stop at a NUL.
        text=text.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}"),
    )


def last_lines(directory: Path, count: int = 20) -> tuple[str, ...]:
    """Return the last lines of the script's output on node 0, of both streams, in order."""
    found: list[str] = []
    for log in LogFile.find(directory):
        if log.key == (0, "supervisor"):
            lines = log.backward(log.length, EVERY_LINE, Budget(_LAST_BYTES), {})
            with suppress(BudgetUsed):
                for entry in islice(lines, count):
                    found.append(entry.line.text)
    return tuple(found[::-1])
