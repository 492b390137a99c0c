"""Cursors: how far the records of one process have been shipped, as a byte offset into its journal.

A process appends to one file, so one number is enough. Several files of a process count as one, in the order of their
numbers.
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
"""Bytes of records that one :meth:`Cursor.read` returns, about."""
VERSION = 2
"""Version of the state file."""


class Line(NamedTuple):
    """A record as it is stored in a journal.

    Attributes:
        seq: its number.
        text: its line, without the newline.
        record: the decoded line; numbers that are not finite are the strings of the wire contract, §2.1.
        end: offset of the byte after it.
    """

    seq: int
    text: bytes
    record: dict[str, Any]
    end: int

    def decoded(self) -> dict[str, Any]:
        """Return the record with numbers that are not finite as floats."""
        from det_core.journal._format import decode

        return decode(self.text) or self.record


class Cursor:
    """Read position in the records of one process, in the order in which they were written.

    Args:
        folder: the run's directory.
        restart: the restart in the journal's name.
        rank: the rank in the journal's name.
        name: prefix of the state file beside the journal, ``<name>-<restart>-<rank>.json``.
        to: destination of the records. State that was saved for another destination is ignored.

    Attributes:
        offset: bytes of the journal that have been shipped.
        saved: content of the last :meth:`save` for this destination, by this process or an earlier one; empty if none.
        damaged: lines among those of the last :meth:`read` that are not records: torn, or changed on the disk.
    """

    def __init__(self, folder: Path, restart: int, rank: int, *, name: str = "shipped", to: str = "") -> None:
        self.restart = restart
        self.rank = rank
        self._folder = folder
        self._to = to
        self._state = folder / f"{name}-{restart}-{rank}.json"
        self.saved = self._load_state()
        self.offset = int(self.saved.get("offset", 0))
        self.damaged: list[bytes] = []

    def read(self) -> list[Line]:
        """Return the next records, about 1 MB of them; none if all that is written now has been read.

        The same records are returned again until the cursor is advanced (:meth:`advance`).
        """
        self.damaged = []
        files = self._files()
        if files and self.offset > files[-1].begin + files[-1].size:
            self.offset = 0  # another file has taken its place: shipping records twice beats losing them
        for part in files:
            if self.offset < part.begin + part.size:
                lines = self._read_part(part)
                if lines is None or lines:
                    return lines or []
            if part is not files[-1]:
                # What is left of it is half a line: its writer went on in the next file, and will not end it.
                self.offset = max(self.offset, part.begin + part.size)
        return []

    def advance(self, lines: Iterable[Line]) -> None:
        """Advance past these records and all before them."""
        self.offset = max([self.offset, *(line.end for line in lines)])

    def save(self, **more: Any) -> None:
        """Save the offset on disk, in one step. It may be lost with the machine, and records are then shipped twice.

        Args:
            more: further values for :attr:`saved`.

        Raises:
            OSError: If the state file cannot be written.
        """
        state = {"version": VERSION, "to": self._to, "offset": self.offset, **more}
        write_atomic(self._state, json.dumps(state).encode(), durable=False)
        self.saved = state

    def count_remaining(self) -> int:
        """Return the number of records that are written and not shipped."""
        ahead = copy(self)
        count = 0
        while lines := ahead.read():
            count += len(lines)
            ahead.advance(lines)
        return count

    def _files(self) -> list[_FileSpan]:
        """Return the process's files with the offsets at which they begin."""
        parts: list[_FileSpan] = []
        begin = 0
        for path in journal_files(self._folder).get((self.restart, self.rank), []):
            with suppress(FileNotFoundError):
                status = path.stat()
                size = status.st_size
                if not stat.S_ISREG(status.st_mode):  # a pipe in a file's place: reading it could block
                    size = 0
                parts.append(_FileSpan(path, begin, size))
                begin += size
        return parts

    def _read_part(self, part: _FileSpan) -> list[Line] | None:
        """Return the next records of a file, or None if it cannot be opened now.

        If it has none, the offset is moved past torn and empty lines for good.
        """
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
                if record is None and text.strip():
                    self.damaged.append(text)
                elif record is not None and record["kind"] != "journal":
                    lines.append(Line(record["seq"], text[:-1], record, end))
        if not lines:
            self.offset = end
        return lines

    def _load_state(self) -> dict[str, Any]:
        """Return the content of the state file, or an empty dict if it was saved for another destination."""
        try:
            state = json.loads(self._state.read_bytes())
            is_ours = (state["to"], state["version"]) == (self._to, VERSION) and int(state["offset"]) >= 0
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        if not is_ours:
            return {}
        return dict(state)


def open_cursors(folder: Path, *, name: str = "shipped", to: str = "", run_id: str | None = None) -> list[Cursor]:
    """Return a cursor for each process that has written a journal in ``folder``, by restart and rank.

    Args:
        folder: the run's directory.
        name, to: as for :class:`Cursor`.
        run_id: ID of the run; journals of other runs in the directory are skipped. Defaults to any.
    """
    return [
        Cursor(folder, restart, rank, name=name, to=to)
        for (restart, rank), files in journal_files(folder).items()
        if is_of_run(files, run_id)
    ]


def rank_cursors(
    folder: Path, restart: int, rank: int, *, name: str = "shipped", to: str = "", run_id: str | None = None
) -> list[Cursor]:
    """Return a cursor for each restart of a rank up to ``restart``, oldest first. That one need not have begun.

    Args:
        folder, name, to, run_id: as for :func:`open_cursors`.
        restart: the last restart.
        rank: the rank.
    """
    restarts = [
        begun
        for (begun, number), files in journal_files(folder).items()
        if number == rank and begun < restart and is_of_run(files, run_id)
    ]
    return [Cursor(folder, begun, rank, name=name, to=to) for begun in [*restarts, restart]]


class _FileSpan(NamedTuple):
    """A file of a process and the offsets of its bytes, from ``begin``."""

    path: Path
    begin: int
    size: int
