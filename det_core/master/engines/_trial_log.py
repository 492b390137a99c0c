"""The log of a trial: those of all nodes and writers of its runs, merged by time, read from any line on.

A *position* is, within one run, an offset in each of its logs. What comes before it in other runs is older, and what
comes in later runs is newer. So no line is left out or read twice, however late those of one node arrive beside those
of others, and a reader goes on at a position after any time.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._log_file import (
    EVERY_LINE,
    Budget,
    BudgetUsed,
    Entry,
    LineFilter,
    LogFile,
    LogKey,
    LogLine,
)
from det_core.master.engines._supervisor._log import LOG, LogWriter

MAX_READ_BYTES = 64 << 20
"""Bytes that one read looks at."""
MAX_READ_LINES = 2000
MAX_READ_CHARS = 256 << 10
"""Characters of lines after which a read ends."""
MAX_LINE_CHARS = 64 * 1024
"""Characters after which a line that is appended goes on in the next one."""
_PLACE = re.compile(r"([0-9]{1,5})\.(supervisor|master|task)\.([0-9]{1,18})")
POSITION_PATTERN = rf"[0-9]{{1,9}}(\.{_PLACE.pattern}(~{_PLACE.pattern})*)?"
ID_PATTERN = f"^{POSITION_PATTERN}$"
"""Pattern of the ID of a line, which is the position before it; a run alone is its beginning."""


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
        budget = Budget(max_bytes)
        position = Position(at.run, dict(at.offsets))
        for run in self._runs(at.run, self._last_run if end is None else end.run):
            if run != position.run:
                position = Position(run)
            limits = end.offsets if end is not None and end.run == run else None
            try:
                for key, entry in self._forward(position, choice, budget, limits):
                    line = self._labeled(entry.line, key, run)
                    lines.append(PlacedLine(_line_id(position, key, entry), entry.time, line))
                    position.offsets[key] = entry.end
                    size += len(entry.line.text)
                    if len(lines) >= max_lines or size >= MAX_READ_CHARS:
                        return Page(lines, position, is_end=False)
            except BudgetUsed:
                return Page(lines, position, is_end=False)
        return Page(lines, position, is_end=True)

    def tail(
        self, end: Position, count: int, choice: LineFilter = EVERY_LINE, *, max_bytes: int = MAX_READ_BYTES
    ) -> Tail:
        """Look for the last lines before a position, through so many bytes at most."""
        found = 0
        budget = Budget(max_bytes)
        position = Position(end.run, dict(end.offsets))
        for run in reversed(self._runs(0, end.run)):
            logs = self._logs(run)
            if run != position.run:
                position = Position(run, {log.key: log.length for log in logs})
            offsets = position.offsets
            # Reversed, so that of equal times the one comes first here that comes last in a read.
            entries = [
                _keyed(log.key, log.backward(offsets.get(log.key, 0), choice, budget, offsets))
                for log in reversed(logs)
            ]
            try:
                for key, entry in heapq.merge(*entries, key=_time, reverse=True):
                    offsets[key] = entry.begin
                    found += 1
                    if found >= count:
                        return Tail(found, position, is_begin=False)
            except BudgetUsed:
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

    def _forward(
        self, position: Position, choice: LineFilter, budget: Budget, limits: dict[LogKey, int] | None
    ) -> Iterator[tuple[LogKey, Entry]]:
        logs = []
        for log in self._logs(position.run):
            entries = log.forward(position.offsets.get(log.key, 0), choice, budget, position.offsets)
            if limits is not None:
                entries = _until(limits.get(log.key, 0), entries)
            logs.append(_keyed(log.key, entries))
        return heapq.merge(*logs, key=_time)

    def _labeled(self, line: LogLine, key: LogKey, run: int) -> LogLine:
        """Return a line with its allocation; one that was sent has that which it names."""
        return line if key[1] == "task" else line._replace(allocation_id=f"{self._task_id}.{run}")


def _until(offset: int, entries: Iterator[Entry]) -> Iterator[Entry]:
    return takewhile(lambda entry: entry.begin < offset, entries)


def _keyed(key: LogKey, entries: Iterator[Entry]) -> Iterator[tuple[LogKey, Entry]]:
    for entry in entries:
        yield key, entry


def _time(keyed: tuple[LogKey, Entry]) -> float:
    return keyed[1].time


def _line_id(position: Position, key: LogKey, entry: Entry) -> str:
    """Return the ID of a line: run, node, writer and offset, then where the other logs of the run stood."""
    others = {other: at for other, at in position.offsets.items() if other != key and at}
    return Position(position.run, {key: entry.begin, **others}).to_text()


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
    return b"".join(b"%s j %s\n" % (stamp, piece.to_json()) for piece in _pieces(line))


def delete_folders(allocations: Path, task_ids: Collection[str]) -> None:
    """Delete the folders of all allocations of tasks.

    Raises:
        OSError: If one cannot be deleted.
    """
    with suppress(FileNotFoundError), os.scandir(allocations) as entries:
        for entry in entries:
            if entry.name.rpartition(".")[0] in task_ids:
                AllocationFolder(Path(entry.path)).remove()


def _pieces(line: LogLine) -> list[LogLine]:
    text = line.text.removesuffix("\n")
    starts = range(0, len(text) or 1, MAX_LINE_CHARS)
    pieces = [line._replace(text=text[start : start + MAX_LINE_CHARS], end="") for start in starts]
    return [*pieces[:-1], pieces[-1]._replace(end=line.text[len(text) :])]
