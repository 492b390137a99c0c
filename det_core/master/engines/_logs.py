"""The log of a trial: those of all nodes and writers of its runs, merged by time, read from any line on.

A *position* is, within one run, an offset in each of its logs. What comes before it in other runs is older, and what
comes in later runs is newer. So no line is left out or read twice, however late those of one node arrive beside those
of others, and a reader goes on at a position after any time. The files are described in ``_supervisor/_log``.
"""

from __future__ import annotations

import errno
import heapq
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from det_core.master.engines._supervisor._log import LOG, LogWriter, find_segments, segment_name

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_READ_BYTES = 64 << 20
"""Bytes that one read looks at."""
MAX_READ_LINES = 2000
MAX_READ_CHARS = 256 << 10
"""Characters of lines after which a read ends."""
MAX_LINE_CHARS = 64 * 1024
"""Characters after which a line that is appended goes on in the next one."""
_BLOCK_BYTES = 128 * 1024
_MAX_RECORD_BYTES = 1 << 20
"""Bytes without a line end after which they are taken for damage: a line of a supervisor has about 64 KiB."""
_LAST_BYTES = 256 * 1024
_MIN_TIME = -62_135_596_800
"""Year 1, which a script may send."""
_MAX_TIME = 253_402_300_799
_NOT_A_SEGMENT = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ELOOP)
_TIME = rb"^([0-9]{1,11}\.[0-9]{6}) "
_HEAD = re.compile(_TIME, re.MULTILINE)
_JSON = re.compile(_TIME + rb"j (.*)\n", re.MULTILINE)
_OUTPUT = re.compile(
    _TIME + rb"([oe]) (?:\[rank=([0-9]{1,9})\] )?(?:(%s): )?(.*)\n" % "|".join(LEVELS).encode(), re.MULTILINE
)
_PLACE = re.compile(r"([0-9]{1,5})\.(supervisor|master|task)\.([0-9]{1,18})")
POSITION_PATTERN = rf"[0-9]{{1,9}}(\.{_PLACE.pattern}(~{_PLACE.pattern})*)?"
ID_PATTERN = f"^{POSITION_PATTERN}$"
"""Pattern of the ID of a line, which is the position before it; a run alone is its beginning."""
LogKey = tuple[int, str]
"""Node and writer."""


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
        is_time = type(line.time) in (int, float) and _MIN_TIME <= line.time <= _MAX_TIME
        if not is_time or type(line.rank) not in (int, type(None)) or not all(type(word) is str for word in words):
            raise ValueError("not a line")
        return line


@dataclass(frozen=True)
class LineFilter:
    """Choice of lines.

    Attributes:
        min_level: Lowest level, one of :data:`LEVELS`; None: any.
        rank: Rank that a line begins with; None: any, or none.
    """

    min_level: str | None = None
    rank: int | None = None

    @cached_property
    def _levels(self) -> frozenset[str | None]:
        lowest = LEVELS.index(self.min_level or LEVELS[0])
        chosen: set[str | None] = set(LEVELS[lowest:])
        if "INFO" in chosen:
            chosen.add(None)  # a line without a level is INFO
        return frozenset(chosen)

    def accepts(self, rank: int | None, level: str | None) -> bool:
        """Return whether a line is chosen; one without a level, or with another word, is INFO."""
        if self.rank is not None and rank != self.rank:
            return False
        if level not in LEVELS:
            level = None
        return level in self._levels


EVERY_LINE = LineFilter()


@dataclass
class Position:
    """Place between the lines of a trial's log.

    Attributes:
        run: Number of the run.
        offsets: Offsets in the logs of the run, by node and writer; 0 in the others.
    """

    run: int = 0
    offsets: dict[LogKey, int] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Return the position that a text of the form :data:`POSITION_PATTERN` names."""
        run, _, places = text.partition(".")
        offsets = {(int(node), writer): int(offset) for node, writer, offset in _PLACE.findall(places)}
        return cls(int(run), offsets)

    def to_text(self) -> str:
        """Return it as a text."""
        places = "~".join(f"{node}.{writer}.{offset}" for (node, writer), offset in self.offsets.items())
        return f"{self.run}.{places}" if places else f"{self.run}"

    def latest(self, other: Position) -> Position:
        """Return the place before which everything lies that is before one of the two."""
        if self.run != other.run:
            return max(self, other, key=lambda position: position.run)
        keys = self.offsets.keys() | other.offsets.keys()
        return Position(self.run, {key: max(self.offsets.get(key, 0), other.offsets.get(key, 0)) for key in keys})


class PlacedLine(NamedTuple):
    """A line with its ID, and when it was written, by which logs are merged."""

    id: str
    time: float
    line: LogLine


@dataclass(frozen=True)
class Page:
    """Result of a read.

    Attributes:
        lines: Lines.
        next: Where to go on.
        is_end: Whether nothing followed at the time of the read.
    """

    lines: list[PlacedLine]
    next: Position
    is_end: bool


@dataclass(frozen=True)
class Tail:
    """Result of a search for the last lines.

    Attributes:
        count: How many were found.
        begin: Where they begin.
        is_begin: Whether nothing comes before.
    """

    count: int
    begin: Position
    is_begin: bool


class TrialLog:
    """Log of a trial, as it is on disk at each call. All methods block.

    Args:
        allocations: The directory with the folders of all allocations.
        task_id: Task ID of the trial.
        last_run: Number of its last run so far.
    """

    def __init__(self, allocations: Path, task_id: str, last_run: int) -> None:
        self._allocations = allocations
        self._task_id = task_id
        self._last_run = last_run

    def read(
        self,
        at: Position,
        choice: LineFilter = EVERY_LINE,
        *,
        end: Position | None = None,
        max_lines: int = MAX_READ_LINES,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Page:
        """Return the lines from a position on, at most some, after a look at so many bytes at most.

        Args:
            at: Where to begin.
            choice: Lines to return.
            end: Where to end; None: where the log ends now.
            max_lines: Maximum number of lines.
            max_bytes: Maximum number of bytes to look at, beyond a block in each log.
        """
        lines: list[PlacedLine] = []
        size = 0
        position = Position(at.run, dict(at.offsets))
        for run in self._runs(at.run, self._last_run if end is None else end.run):
            if run != position.run:
                position = Position(run)
            logs = []
            for log in self._logs(run):
                entries = log.forward(position.offsets.get(log.key, 0), choice)
                if end is not None and end.run == run:
                    entries = _until(end.offsets.get(log.key, 0), entries)
                logs.append(entries)
            # Within a log the order is that of the file, whatever the clock did.
            for entry in heapq.merge(*logs, key=_time):
                position.offsets[entry.key] = entry.end
                if entry.line is None:
                    max_bytes -= entry.end - entry.begin
                else:
                    line = entry.line
                    if entry.key[1] != "task":  # one that was sent has the allocation that it names
                        line = line._replace(allocation_id=f"{self._task_id}.{run}")
                    lines.append(PlacedLine(_line_id(position, entry), entry.time, line))
                    size += len(line.text)
                if len(lines) >= max_lines or size >= MAX_READ_CHARS or max_bytes <= 0:
                    return Page(lines, position, is_end=False)
        return Page(lines, position, is_end=True)

    def tail(
        self, end: Position, count: int, choice: LineFilter = EVERY_LINE, *, max_bytes: int = MAX_READ_BYTES
    ) -> Tail:
        """Look for the last lines before a position, through so many bytes at most."""
        found = 0
        position = Position(end.run, dict(end.offsets))
        for run in reversed(self._runs(0, end.run)):
            logs = self._logs(run)
            if run != position.run:
                position = Position(run, {log.key: log.length for log in logs})
            offsets = position.offsets
            # Reversed, so that of equal times the one comes first here that comes last in a read.
            entries = [log.backward(offsets.get(log.key, 0), choice) for log in reversed(logs)]
            for entry in heapq.merge(*entries, key=_time, reverse=True):
                offsets[entry.key] = entry.begin
                if entry.line is None:
                    max_bytes -= entry.end - entry.begin
                else:
                    found += 1
                if found >= count or max_bytes <= 0:
                    return Tail(found, position, is_begin=False)
        return Tail(found, position, is_begin=True)

    @property
    def end(self) -> Position:
        """The place behind all lines."""
        runs = self._runs(0, self._last_run)
        if not runs:
            return Position()
        return Position(runs[-1], {log.key: log.length for log in self._logs(runs[-1])})

    def at(self, time: float) -> Position:
        """Return the place before the lines that were written at a time or later."""
        for run in self._runs(0, self._last_run):
            logs = self._logs(run)
            offsets = {log.key: log.offset_at(time) for log in logs}
            if any(offsets[log.key] < log.length for log in logs):
                return Position(run, offsets)
        return self.end

    def after(self, line_id: str) -> Position:
        """Return the place behind the line with an ID."""
        position = Position.from_text(line_id)
        own = next(iter(position.offsets), None)
        for log in self._logs(position.run):
            if log.key == own:
                position.offsets[own] = log.after(position.offsets[own])
        return position

    def _runs(self, first: int, last: int) -> list[int]:
        """Return the numbers of the runs that have a log."""
        return [run for run in range(first, min(last, self._last_run) + 1) if self._directory(run).is_dir()]

    def _directory(self, run: int) -> Path:
        return self._allocations / f"{self._task_id}.{run}" / LOG

    def _logs(self, run: int) -> list[LogFile]:
        return LogFile.find(self._directory(run))


class Entry(NamedTuple):
    """A line with its place, or the place of a block of which all chosen lines were yielded.

    Attributes:
        time: When it was written, by which logs are merged; for a block such that it comes first.
        key: Its log.
        begin: Offset of its first byte.
        end: Offset of what follows.
        line: The line; None for a block.
    """

    time: float
    key: LogKey
    begin: int
    end: int
    line: LogLine | None


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
            return segment.end

    def after(self, offset: int) -> int:
        """Return the offset of what follows the line, or the note of a gap, that begins at an offset."""
        for start, _ in self._segments:
            if offset == start - 1:
                return start
            with self._open(start) as segment:
                if start <= offset < segment.end:
                    # A line that was torn has no end; then all that is there is skipped.
                    data = segment.read(offset, _MAX_RECORD_BYTES)
                    return offset + (data.find(b"\n") + 1 or len(data))
        return offset

    def forward(self, offset: int, choice: LineFilter) -> Iterator[Entry]:
        """Yield the chosen lines from where a line begins up to the last whole one, and the blocks."""
        end = 0
        for start, following in self._segments:
            if following is not None and following <= offset:
                continue
            if start > offset:
                yield self._gap(end, start)
                offset = start
            with self._open(start) as segment:
                while block := segment.lines_from(offset):
                    yield from self._entries(block, offset, choice)
                    yield Entry(-inf, self.key, offset, offset + len(block), None)
                    offset += len(block)
                end = segment.end
            if following == end:
                offset = following  # beyond a line that was torn by a kill

    def backward(self, offset: int, choice: LineFilter) -> Iterator[Entry]:
        """Yield the chosen lines before an offset, the last one first, and the blocks."""
        for start, following in reversed(self._segments):
            if start >= offset:
                continue
            with self._open(start) as segment:
                if following is not None and segment.end < following <= offset:
                    yield self._gap(segment.end, following)
                # An offset beyond it lies in a gap.
                offset = min(offset, segment.end)
                while block := segment.lines_before(offset):
                    begin = offset - len(block)
                    yield from self._entries(block, begin, choice, is_backward=True)
                    yield Entry(inf, self.key, begin, offset, None)
                    offset = begin
            offset = start

    def offset_at(self, time: float) -> int:
        """Return the offset of the first line that was written at a time or later."""
        for start, _ in reversed(self._segments):
            # From behind: the first segment that begins early enough holds the place.
            if (first := self._time_at(start)) is None or first >= time:
                continue
            offset = start
            with self._open(start) as segment:
                while block := segment.lines_from(offset):
                    # One look at its last line spares all others of a block that is too old.
                    last = _HEAD.match(block, block.rfind(b"\n", 0, -1) + 1)
                    if last is None or float(last[1]) >= time:
                        for head in _HEAD.finditer(block):
                            if float(head[1]) >= time:
                                return offset + head.start()
                    offset += len(block)
            return offset
        return self._segments[0][0]

    def _entries(self, block: bytes, offset: int, choice: LineFilter, *, is_backward: bool = False) -> Iterator[Entry]:
        """Yield the chosen ones of the lines in a block that begins at an offset."""
        is_output = self.key[1] == "supervisor"
        matches: Iterable[re.Match[bytes]] = (_OUTPUT if is_output else _JSON).finditer(block)
        if is_backward:
            matches = reversed(list(matches))  # of which most are not looked at: the last lines are wanted
        for match in matches:
            line = _output_line(match, choice) if is_output else _json_line(match, choice)
            if line is not None:
                yield Entry(float(match[1]), self.key, offset + match.start(), offset + match.end(), line)

    def _gap(self, begin: int, end: int) -> Entry:
        """Return a note in the place of segments that were deleted.

        It has the place of the last byte that is missing, at which no line can have begun: so whoever goes on behind
        the last line before the gap, even if that was deleted, too, gets the note, and whoever goes on behind the note
        does not get it again.
        """
        time = self._time_at(end) or 0.0
        text = f"{end - begin} bytes of this log were deleted here, as its first and its last lines are kept"
        return Entry(time, self.key, end - 1, end, LogLine(time, "stderr", None, "WARNING", text, source="master"))

    def _time_at(self, start: int) -> float | None:
        """Return the time of the first line of a segment."""
        with self._open(start) as segment:
            head = _HEAD.search(segment.read(start, _BLOCK_BYTES))
        return head and float(head[1])

    @contextmanager
    def _open(self, start: int) -> Iterator[_Segment]:
        path = self._directory / segment_name(*self.key, start)
        try:
            # A script may have put a FIFO here, at which a plain open() waits.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in _NOT_A_SEGMENT:
                raise
            yield _Segment(None, start)
            return
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                yield _Segment(fd, start)
            else:
                yield _Segment(None, start)
        finally:
            os.close(fd)


class _Segment:
    """Open file of a segment; None stands for one that is not there any more, which is empty. Offsets are the log's."""

    def __init__(self, fd: int | None, start: int) -> None:
        self._fd = fd
        self._start = start
        self.end = start
        if fd is not None:
            self.end += os.fstat(fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        if self._fd is None:
            return b""
        return os.pread(self._fd, size, offset - self._start)

    def lines_from(self, offset: int) -> bytes:
        """Return a block of whole lines; empty if none follows, or the last one has not ended."""
        for size in (_BLOCK_BYTES, _MAX_RECORD_BYTES):
            data = self.read(offset, size)
            whole = data[: data.rfind(b"\n") + 1]
            if whole or len(data) < size:
                return whole
        return data

    def lines_before(self, offset: int) -> bytes:
        """Return a block of lines that ends at an offset; of a line that has not ended, what there is of it."""
        for size in (_BLOCK_BYTES // 4, _MAX_RECORD_BYTES):
            begin = max(offset - size, self._start)
            data = self.read(begin, offset - begin)
            first = data.find(b"\n") + 1
            if begin == self._start:
                return data
            if 0 < first < len(data):
                return data[first:]
        return data


def last_lines(directory: Path, count: int = 20, *, node: int = 0) -> tuple[str, ...]:
    """Return the last lines of the script's output on a node, of both streams, in order."""
    lines: list[str] = []
    max_bytes = _LAST_BYTES
    for log in LogFile.find(directory):
        if log.key != (node, "supervisor"):
            continue
        for entry in log.backward(log.length, EVERY_LINE):
            if entry.line is None:
                max_bytes -= entry.end - entry.begin
            else:
                lines.append(entry.line.text)
            if len(lines) >= count or max_bytes <= 0:
                break
    return tuple(reversed(lines))


def append_lines(allocations: Path, allocation_id: str, writer: str, lines: Sequence[LogLine]) -> None:
    """Append lines, all or none, to the log of an allocation; for one thread at a time.

    Raises:
        OSError: If they cannot be written.
    """
    log = LogWriter(str(allocations / allocation_id / LOG), 0, writer)
    try:
        stamp = log.stamp()
        log.append(b"".join(encode_line(stamp, line) for line in lines))
    finally:
        log.close()


def encode_line(stamp: bytes, line: LogLine) -> bytes:
    """Return a line as it is written by the master: at the time of the stamp, in pieces if it is long."""
    text = line.text.removesuffix("\n")
    starts = range(0, len(text) or 1, MAX_LINE_CHARS)
    pieces = [line._replace(text=text[start : start + MAX_LINE_CHARS], end="") for start in starts]
    pieces[-1] = pieces[-1]._replace(end=line.text[len(text) :])
    return b"".join(b"%s j %s\n" % (stamp, piece.to_json()) for piece in pieces)


def _clean(value: object) -> object:
    """Return a text without halves of surrogate pairs, which UTF-8 has no bytes for."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _output_line(match: re.Match[bytes], choice: LineFilter) -> LogLine | None:
    rank = None if match[3] is None else int(match[3])
    level = None if match[4] is None else match[4].decode()
    if not choice.accepts(rank, level):
        return None
    return LogLine(
        time=float(match[1]),
        stream="stderr" if match[2] == b"e" else "stdout",
        rank=rank,
        level=level,
        # Terminals and databases of readers stop at a NUL.
        text=match[5].decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}"),
    )


def _json_line(match: re.Match[bytes], choice: LineFilter) -> LogLine | None:
    with suppress(ValueError):
        line = LogLine.from_json(match[2])
        if choice.accepts(line.rank, line.level):
            return line
    return None


def _line_id(position: Position, entry: Entry) -> str:
    """Return the ID of a line: run, node, writer and offset, then where the other logs of the run stood."""
    others = {other: at for other, at in position.offsets.items() if other != entry.key and at}
    return Position(position.run, {entry.key: entry.begin, **others}).to_text()


def _until(offset: int, entries: Iterator[Entry]) -> Iterator[Entry]:
    return takewhile(lambda entry: entry.begin < offset, entries)


def _time(entry: Entry) -> float:
    return entry.time
