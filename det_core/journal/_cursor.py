"""Carrying the records of one process elsewhere: what is new, and how far that got, as a byte offset.

A process appends to one file, whose bytes are the order of its reports, and which comes back byte by byte after it was
deleted. So one number says all. Of a process of several files (of a disk that stayed full, or of earlier versions)
they count as one, in the order of their numbers.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

from det_core._standalone.files import write_atomic
from det_core.journal._run_folder import journal_files, open_file
from det_core.journal._scan import is_of_run

READ_BYTES = 1 << 20
"""Bytes of records that are given at a time."""
VERSION = 2


class Line(NamedTuple):
    """A record as it stands in a journal.

    Attributes:
        seq: its number.
        text: its line, the newline left out.
        record: what that says; numbers that are not finite as the strings of the wire contract, §2.1.
        end: the offset behind it.
    """

    seq: int
    text: bytes
    record: dict[str, Any]
    end: int

    def decoded(self) -> dict[str, Any]:
        """The record, with the numbers that are not finite as numbers."""
        from det_core.journal._format import decode

        return decode(self.text) or self.record


class Cursor:
    """Gives the records of one process that were not carried yet, in the order in which they were written.

    Args:
        folder: the run's folder.
        restart: the restart that the journal's name says.
        rank: the rank.
        name: what the file beside the journal is called that remembers how far it got, as
            ``<name>-<restart>-<rank>.json``.
        to: where the records are carried; what was remembered for another place means nothing.

    Attributes:
        offset: bytes of the journal that are dealt with.
        saved: what the last :meth:`save` for this place holds, of an earlier process too; empty: there is none.
    """

    def __init__(self, folder: Path, restart: int, rank: int, *, name: str = "shipped", to: str = "") -> None:
        self.restart, self.rank = restart, rank
        self._folder, self._to = folder, to
        self._state = folder / f"{name}-{restart}-{rank}.json"
        self.saved = self._load_state()
        self.offset = int(self.saved.get("offset", 0))

    def read(self) -> list[Line]:
        """The next records, from about 1 MB; none: all that is written now was given.

        What was given comes again, until it is :meth:`advance`-ed.
        """
        files = self._files()
        if files and self.offset > files[-1].begin + files[-1].size:
            self.offset = 0  # another file has taken the place: rather carried twice than lost
        for part in files:
            if self.offset < part.begin + part.size:
                lines = self._read_part(part)
                if lines is None or lines:
                    return lines or []
            if part is not files[-1]:
                self.offset = max(self.offset, part.begin + part.size)  # perhaps half a line, which nobody will end
        return []

    def advance(self, lines: Iterable[Line]) -> None:
        """These, and all before them, have arrived."""
        self.offset = max([self.offset, *(line.end for line in lines)])

    def save(self, **more: Any) -> None:
        """Remember on disk what was marked: whole or not at all, though not proof against a machine that fails.

        Args:
            more: what else to find in ``saved``.

        Raises:
            OSError: the disk refused.
        """
        state = {"version": VERSION, "to": self._to, "offset": self.offset, **more}
        write_atomic(self._state, json.dumps(state).encode(), durable=False)
        self.saved = state

    def count_remaining(self) -> int:
        """How many records are written and not marked."""
        ahead, number = copy(self), 0
        while lines := ahead.read():
            number += len(lines)
            ahead.advance(lines)
        return number

    def _files(self) -> list[_FileSpan]:
        """The process's files, one behind the other."""
        parts: list[_FileSpan] = []
        begin = 0
        for path in journal_files(self._folder).get((self.restart, self.rank), []):
            with suppress(FileNotFoundError):
                found = path.stat()
                parts.append(_FileSpan(path, begin, found.st_size if stat.S_ISREG(found.st_mode) else 0))
                begin += parts[-1].size
        return parts

    def _read_part(self, part: _FileSpan) -> list[Line] | None:
        """The next records of a file; None: it cannot be opened now. Where there are none, what is torn or empty is
        passed over for good."""
        from det_core.journal._format import parse

        file = open_file(part.path)
        if file is None:
            return None
        lines: list[Line] = []
        end = self.offset
        with file:
            file.seek(self.offset - part.begin)
            for text in file:
                if not text.endswith(b"\n") or (lines and end > self.offset + READ_BYTES):
                    break
                end += len(text)
                record = parse(text)
                if record is not None and record["kind"] != "journal":
                    lines.append(Line(record["seq"], text[:-1], record, end))
        if not lines:
            self.offset = end
        return lines

    def _load_state(self) -> dict[str, Any]:
        """Return what the file beside the journal says; nothing where that is of another place."""
        try:
            state = json.loads(self._state.read_bytes())
            is_ours = (state["to"], state["version"]) == (self._to, VERSION) and int(state["offset"]) >= 0
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return dict(state) if is_ours else {}


def open_cursors(folder: Path, *, name: str = "shipped", to: str = "", run_id: str | None = None) -> list[Cursor]:
    """One for each process that has written a journal in ``folder``, by restart and rank.

    Args:
        folder: the run's folder.
        name, to: as of :class:`Cursor`.
        run_id: only of journals that say so of themselves.
    """
    return [
        Cursor(folder, restart, rank, name=name, to=to)
        for (restart, rank), files in journal_files(folder).items()
        if is_of_run(files, run_id)
    ]


def rank_cursors(
    folder: Path, restart: int, rank: int, *, name: str = "shipped", to: str = "", run_id: str | None = None
) -> list[Cursor]:
    """Return one for each restart of a rank, oldest first: those before ``restart``, and that one, which may be new.

    Args:
        folder, name, to, run_id: as of :func:`open_cursors`.
        restart: the last one.
        rank: the rank.
    """
    restarts = [
        begun
        for (begun, number), files in journal_files(folder).items()
        if number == rank and begun < restart and is_of_run(files, run_id)
    ]
    return [Cursor(folder, begun, rank, name=name, to=to) for begun in [*restarts, restart]]


class _FileSpan(NamedTuple):
    """A file of a process: its bytes count from ``begin``."""

    path: Path
    begin: int
    size: int
