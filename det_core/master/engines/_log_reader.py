"""Reading the log that a supervisor writes, from where it was read last."""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path

from det_core.master.engines._protocol import LogLine

_LEVELS = "(DEBUG|INFO|WARNING|ERROR|CRITICAL): "
_BEGIN = re.compile(rf"(?=[\[DIWEC])(?:\[rank=([0-9]{{1,9}})\] )?{_LEVELS}|\[rank=([0-9]{{1,9}})\] ")
_READ_BYTES = 96 * 1024
_LAST_BYTES = 256 * 1024


class LogReader:
    """Gives the lines of a log once each.

    Args:
        path: the log.
        mark: where to go on; None for the beginning.
    """

    def __init__(self, path: Path, mark: str | None = None) -> None:
        self._path = path
        self._offset = int((mark or "0").partition(":")[0])  # further numbers are those of an earlier version

    @property
    def mark(self) -> str:
        """Where to go on, once the lines given so far are kept."""
        return str(self._offset)

    def read(self, limit: int = _READ_BYTES) -> tuple[list[LogLine], bool]:
        """Return the lines of the next ``limit`` bytes or so, and whether there is more."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(limit)
                if b"\n" not in data:
                    data += file.readline()
        except (FileNotFoundError, NotADirectoryError):
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = [line for record in whole.splitlines() for line in _lines(record)]
        return lines, len(data) >= limit and bool(whole)


def line_of(time: float, stream: str, text: str) -> LogLine:
    """Return a line, with the rank and the level that it begins with taken out (wire contract, §7.1)."""
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")  # which no database takes
    begin = _BEGIN.match(text)
    if begin is None:
        return LogLine(time, stream, None, None, text)
    with_level, level, alone = begin.groups()
    rank = with_level or alone
    return LogLine(time, stream, int(rank) if rank else None, level, text[begin.end() :])


def last_lines(path: Path, count: int = 20) -> tuple[str, ...]:
    """Return the last lines of a log, of both streams, in order."""
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, 2) - _LAST_BYTES, 0))
            records = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    lines = deque((line for record in records for line in _lines(record)), count)
    return tuple(line.text for line in lines)


def _lines(record: bytes) -> list[LogLine]:
    """Return the lines of a record; none if it is damaged: a script may write to this file, too."""
    try:
        found = json.loads(record)
        time = float(found["time"])
        stream = "stderr" if found["stream"] == "stderr" else "stdout"
        return [line_of(time, stream, text) for text in found["lines"]]
    except (ValueError, TypeError, LookupError, AttributeError):
        return []
