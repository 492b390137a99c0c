"""Reading the log that a supervisor writes, from where it was read last, as lines."""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path

from det_core.master.engines._protocol import LogLine

LONGEST = 64 * 1024
"""Bytes after which a line goes on in the next one."""
_STREAMS = {"stdout": 0, "stderr": 1}
_NAMES = tuple(_STREAMS)
_END = re.compile(rb"\r\n|\n|\r")
_LEVELS = "(DEBUG|INFO|WARNING|ERROR|CRITICAL): "
_BEGIN = re.compile(rf"(?=[\[DIWEC])(?:\[rank=([0-9]{{1,9}})\] )?{_LEVELS}|\[rank=([0-9]{{1,9}})\] ")
_LOOK_BACK = 256 * 1024


class LogTail:
    """Gives the lines of a log once each.

    Args:
        path: the log.
        mark: where to go on; None: at the beginning.

    Attributes:
        mark: where to go on, once the lines given so far are kept: the offset of the first record that was not wholly
            given, and how many bytes of either stream were given from there on.
    """

    def __init__(self, path: Path, mark: str | None = None) -> None:
        numbers = [int(number) for number in (mark or "0:0:0").split(":")]
        self._path = path
        self._at = numbers[0]
        self._skip = numbers[1:]
        self._given = numbers[1:]
        self._records: deque[tuple[int, int, int]] = deque()  # offset, stream, bytes: not wholly given yet
        self._lines = (_Lines(), _Lines())

    @property
    def mark(self) -> str:
        """See the class."""
        offset = self._records[0][0] if self._records else self._at
        return f"{offset}:{self._given[0]}:{self._given[1]}"

    def read(self, limit: int = 96 * 1024) -> tuple[list[LogLine], bool]:
        """The lines of the next ``limit`` bytes or so, and whether there is more."""
        try:
            with open(self._path, "rb") as f:
                f.seek(self._at)
                data = f.read(limit)
                while b"\n" not in data and (more := f.read(limit)):
                    data += more
        except (FileNotFoundError, NotADirectoryError):
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        found = [line for record in whole.splitlines(keepends=True) for line in self._take(record)]
        self._settle()
        return found, len(data) >= limit and bool(whole)

    def finish(self) -> list[LogLine]:
        """What is left: lines that do not end."""
        found = [line for stream in (0, 1) for line in self._emit(stream, self._lines[stream].rest())]
        self._settle()
        return found

    def _take(self, line: bytes) -> list[LogLine]:
        offset, self._at = self._at, self._at + len(line)
        try:
            record = json.loads(line)
        except ValueError:  # the machine lost power while it was being written
            return []
        stream = _STREAMS[record["stream"]]
        data = record["data"].encode("utf-8", "surrogateescape")
        self._records.append((offset, stream, len(data)))
        if self._skip[stream]:
            data, self._skip[stream] = data[self._skip[stream] :], max(self._skip[stream] - len(data), 0)
        return self._emit(stream, self._lines[stream].feed(data, record["time"]))

    def _emit(self, stream: int, pieces: list[tuple[float, bytes | None, int]]) -> list[LogLine]:
        found = []
        for time, text, size in pieces:
            self._given[stream] += size
            if text is not None:
                found.append(line_of(time, _NAMES[stream], text))
        return found

    def _settle(self) -> None:
        """Let go of the records that were wholly given."""
        while self._records and self._given[self._records[0][1]] >= self._records[0][2]:
            _, stream, size = self._records.popleft()
            self._given[stream] -= size


class _Lines:
    """One stream, cut into lines.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r`` (progress bars). A ``\\r`` at the start of a line is dropped.
    """

    def __init__(self) -> None:
        self._begun = b""
        self._time = 0.0

    def feed(self, data: bytes, time: float) -> list[tuple[float, bytes | None, int]]:
        """Time, content and size in the stream of each line that is whole now; no content: nothing to show."""
        begun = self._time if self._begun else time
        data, at = self._begun + data, 0
        found: list[tuple[float, bytes | None, int]] = []
        if b"\r" not in data and max(map(len, pieces := data.split(b"\n"))) <= LONGEST:  # nearly always
            self._begun, self._time = pieces.pop(), time if pieces else begun
            found = [(time, text, len(text) + 1) for text in pieces]
            return [(begun, *found[0][1:]), *found[1:]] if found else found
        for end in _END.finditer(data):
            if end.group() == b"\r" and end.end() == len(data):
                break  # the next byte says whether it is half of an end
            text = data[at : end.start()]
            drop = not text and end.group() == b"\r"
            found += [(begun, None, 1)] if drop else _cut(begun, text, end.end() - at)
            at, begun = end.end(), time
        self._begun, self._time = data[at:], begun
        while len(self._begun) > LONGEST + 1:
            size = _whole(self._begun[:LONGEST])
            found.append((self._time, self._begun[:size], size))
            self._begun = self._begun[size:]
        return found

    def rest(self) -> list[tuple[float, bytes | None, int]]:
        """The line that has not ended."""
        text, self._begun = self._begun, b""
        return [(self._time, text.rstrip(b"\r") or None, len(text))] if text else []


def _cut(time: float, text: bytes, size: int) -> list[tuple[float, bytes | None, int]]:
    found: list[tuple[float, bytes | None, int]] = []
    while len(text) > LONGEST:
        length = _whole(text[:LONGEST])
        found.append((time, text[:length], length))
        text, size = text[length:], size - length
    return [*found, (time, text, size)]


def _whole(text: bytes) -> int:
    """How much of ``text`` to take so that no character is cut."""
    for back in range(1, 4):
        if text[-back] & 0xC0 != 0x80:  # where the last character begins
            return len(text) - back if text[-back] >= 0xC0 else len(text)
    return len(text)


def line_of(time: float, stream: str, data: bytes) -> LogLine:
    """A line, with the rank and the level that it begins with taken out (wire contract, §7.1)."""
    text = data.decode("utf-8", "replace")
    if "\0" in text:  # which no database takes
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    begin = _BEGIN.match(text)
    if begin is None:
        return LogLine(time, stream, None, None, text)
    rank, level, alone = begin.groups()
    rank = rank or alone
    return LogLine(time, stream, int(rank) if rank else None, level, text[begin.end() :])


def last_lines(path: Path, count: int = 20) -> tuple[str, ...]:
    """The last lines of a log, of both streams, in order."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            f.seek(max(size - _LOOK_BACK, 0))
            begin = 0 if size <= _LOOK_BACK else size - _LOOK_BACK + len(f.readline())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    tail = LogTail(path, f"{begin}:0:0")
    last: deque[LogLine] = deque(maxlen=count)
    more = True
    while more:
        lines, more = tail.read()
        last.extend(lines)
    last.extend(tail.finish())
    return tuple(line.text for line in last)
