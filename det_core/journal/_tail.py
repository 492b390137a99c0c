"""Carrying the records of one process elsewhere: what is new, by position, and how far it got.

How far is known twice: by the place in each file, so that nothing is read again; and by the numbers of the records,
so that a file that was lost and copied, or a row that was written late, neither doubles nor loses one.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from det_core.journal._folder import journal_files

CHUNK = 1 << 20
"""Bytes that are read at a time."""


class Line(NamedTuple):
    """A record: its number, its line as it stands in the file, and what that says (numbers that are not finite as the
    strings of the wire contract, §2.1)."""

    seq: int
    text: bytes
    record: dict[str, Any]


class Tail:
    """Gives the records of one process that were not carried yet, in the order in which they were written.

    Args:
        folder: the run's folder.
        restart: the restart that the journal's name says.
        rank: the rank.
        name: what the file beside the journal is called that remembers how far it got, as
            ``<name>-<restart>-<rank>.json``.
        to: where the records are carried; what was remembered for another place means nothing.
    """

    def __init__(self, folder: Path, restart: int, rank: int, *, name: str = "shipped", to: str = "") -> None:
        self.restart, self.rank = restart, rank
        self._folder = folder
        self._to = to
        self._state = folder / f"{name}-{restart}-{rank}.json"
        self._places: dict[str, tuple[int, int]] = {}
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._load()

    def read(self, limit: int = CHUNK) -> list[Line]:
        """The next records, from about ``limit`` bytes of one file; none: all that is written now was given.

        What was given comes again, until it is :meth:`mark`-ed.
        """
        for restart, rank, _, path in journal_files(self._folder):
            if (restart, rank) == (self.restart, self.rank):
                while (chunk := self._chunk(path, limit)) is not None:
                    place, text = chunk
                    lines = {line.seq: line for line in map(_line, text.splitlines()) if line and line.seq not in self}
                    if lines:
                        return list(lines.values())
                    self._places[path.name] = place
        return []

    def mark(self, lines: Iterable[Line]) -> None:
        """These have arrived."""
        for line in lines:
            self._add(line.seq)

    def save(self) -> None:
        """Remember on disk what was marked: whole or not at all, though not proof against a machine that fails.

        Raises:
            OSError: the disk refused.
        """
        state = {
            "version": 1,
            "to": self._to,
            "done": list(zip(self._starts, self._ends, strict=True)),
            "files": self._places,
        }
        aside = self._state.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(state))
        os.replace(aside, self._state)

    def position(self) -> int:
        """How many bytes of the files are dealt with."""
        return sum(offset for _, offset in self._places.values())

    def left(self) -> int:
        """How many records are written and not marked."""
        count = 0
        for restart, rank, _, path in journal_files(self._folder):
            if (restart, rank) == (self.restart, self.rank):
                with suppress(FileNotFoundError), open(path, "rb") as f:
                    f.seek(self._place(path, os.fstat(f.fileno())))
                    count += sum(1 for text in f if (line := _line(text)) and line.seq not in self)
        return count

    def __contains__(self, seq: int) -> bool:
        """Whether the record of that number was marked."""
        at = bisect_right(self._starts, seq) - 1
        return at >= 0 and seq < self._ends[at]

    def _chunk(self, path: Path, limit: int) -> tuple[tuple[int, int], bytes] | None:
        """Whole lines that follow what was read, and the place behind them; None: there are none."""
        try:
            with open(path, "rb") as f:
                found = os.fstat(f.fileno())
                start = self._place(path, found)
                f.seek(start)
                text = f.read(limit)
                while text and b"\n" not in text and (more := f.read(limit)):
                    text += more
        except FileNotFoundError:
            return None
        size = text.rfind(b"\n") + 1
        return ((found.st_ino, start + size), text[:size]) if size else None

    def _place(self, path: Path, found: os.stat_result) -> int:
        inode, offset = self._places.get(path.name, (found.st_ino, 0))
        return offset if inode == found.st_ino and offset <= found.st_size else 0

    def _add(self, seq: int) -> None:
        """Note a number, as part of as few ranges as possible."""
        at = bisect_right(self._starts, seq) - 1
        if at >= 0 and seq < self._ends[at]:
            return
        if at >= 0 and self._ends[at] == seq:
            self._ends[at] = seq + 1
        else:
            at += 1
            self._starts.insert(at, seq)
            self._ends.insert(at, seq + 1)
        if at + 1 < len(self._starts) and self._starts[at + 1] == seq + 1:
            self._ends[at] = self._ends.pop(at + 1)
            del self._starts[at + 1]

    def _load(self) -> None:
        try:
            state = json.loads(self._state.read_bytes())
            if state["to"] != self._to or state["version"] != 1:
                return
            starts, ends = [int(a) for a, _ in state["done"]], [int(b) for _, b in state["done"]]
            places = {str(name): (int(inode), int(offset)) for name, (inode, offset) in state["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        self._starts, self._ends, self._places = starts, ends, places


def tails(folder: Path, *, name: str = "shipped", to: str = "", run_id: str | None = None) -> list[Tail]:
    """One for each process that has written a journal in ``folder``, by restart and rank.

    Args:
        folder: the run's folder.
        name, to: as of :class:`Tail`.
        run_id: only of journals that say so of themselves.
    """
    found: dict[tuple[int, int], Path] = {}
    for restart, rank, _, path in journal_files(folder):
        found.setdefault((restart, rank), path)
    return [
        Tail(folder, restart, rank, name=name, to=to)
        for (restart, rank), path in found.items()
        if run_id is None or _header(path).get("run_id") == run_id
    ]


def _line(text: bytes) -> Line | None:
    from det_core.journal._line import parse

    record = parse(text)
    return None if record is None or record["kind"] == "journal" else Line(record["seq"], text, record)


def _header(path: Path) -> dict[str, Any]:
    from det_core.journal._line import parse

    try:
        with open(path, "rb") as f:
            for text in f:
                if text != b"\n":
                    return parse(text) or {}
    except FileNotFoundError:
        pass
    return {}
