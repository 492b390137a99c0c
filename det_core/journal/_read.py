"""Reading journal files: line by line, whatever state they are in."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from det_core.journal._folder import journal_files

NO_STEP = -1
TAIL = 65536
"""Bytes at a file's end in which its last records are looked for."""


@dataclass
class Places:
    """Where the rows of one group are, as columns: a few dozen bytes a row however large it is."""

    restart: array[int] = field(default_factory=lambda: array("i"))
    rank: array[int] = field(default_factory=lambda: array("i"))
    seq: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    file: array[int] = field(default_factory=lambda: array("i"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("q"))

    def add(self, restart: int, rank: int, seq: int, step: int, file: int, offset: int, size: int) -> None:
        """One more row."""
        self.restart.append(restart)
        self.rank.append(rank)
        self.seq.append(seq)
        self.step.append(step)
        self.file.append(file)
        self.offset.append(offset)
        self.size.append(size)

    def __len__(self) -> int:
        return len(self.seq)


@dataclass
class Scan:
    """What the files of a run hold: rows by place, other records whole."""

    files: list[Path] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Places] = field(default_factory=dict)
    records: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    """(restart, rank, record), in no particular order."""
    torn_lines: int = 0


def scan(folder: Path) -> Scan:
    """Read every journal file of a run once. A record that stands twice counts once."""
    found = Scan()
    for (restart, rank), files in groupby(journal_files(folder), key=lambda file: file[:2]):
        paths = [path for *_, path in files]
        seen: set[int] | None = set() if len(paths) > 1 else None  # only a file that was copied has records twice
        for path in paths:
            _scan_file(found, restart, rank, path, seen)
    return found


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and content of every line, the newline left out; blank ones are passed over."""
    at = 0
    try:
        with open(path, "rb", buffering=2**20) as f:
            for line in f:
                if line != b"\n":
                    yield at, line.rstrip(b"\n")
                at += len(line)
    except FileNotFoundError:
        return


def first_steps(places: Places) -> dict[int, int]:
    """Restart -> the step of its first row with a step: the smallest among its ranks' first rows."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for restart, rank, seq, step in zip(places.restart, places.rank, places.seq, places.step, strict=True):
        if step != NO_STEP:
            key = (restart, rank)
            if key not in first or seq < first[key][0]:
                first[key] = (seq, step)
    steps: dict[int, int] = {}
    for (restart, _), (_, step) in first.items():
        steps[restart] = min(step, steps.get(restart, step))
    return steps


def next_seq(folder: Path, stem: str) -> int:
    """The number after the last in the files of a process that wrote here before (0, as a rule)."""
    from det_core.journal._line import decode

    last = -1
    for _, _, _, path in journal_files(folder):
        if path.name.split(".")[0] == stem:
            for _, line in lines(path):
                last = max(last, (decode(line) or {}).get("seq", -1))
    return last + 1


def last_record(folder: Path, restart: int, rank: int, kind: str) -> dict[str, Any] | None:
    """The last record of a kind among the last lines of a process; reads no more than the ends of its files."""
    from det_core.journal._line import decode

    for of_restart, of_rank, _, path in reversed(list(journal_files(folder))):
        if (of_restart, of_rank) == (restart, rank):
            for line in reversed(_tail(path)):
                if (record := decode(line)) and record["kind"] == kind:
                    return record
    return None


def _tail(path: Path) -> list[bytes]:
    try:
        with open(path, "rb") as f:
            f.seek(max(path.stat().st_size - TAIL, 0))
            return f.read().split(b"\n")
    except FileNotFoundError:
        return []


def _scan_file(found: Scan, restart: int, rank: int, path: Path, seen: set[int] | None) -> None:
    from det_core.journal._line import decode

    file = len(found.files)
    found.files.append(path)
    for offset, line in lines(path):
        record = decode(line)
        if record is None:
            found.torn_lines += 1
            continue
        if record["kind"] == "journal":
            found.header = found.header or record
            continue
        seq = record["seq"]
        if seen is not None:
            if seq in seen:
                continue
            seen.add(seq)
        if record["kind"] != "metrics":
            found.records.append((restart, rank, record))
            continue
        places = found.places.get(record["group"])
        if places is None:
            places = found.places[record["group"]] = Places()
        step = record["steps_completed"]
        places.add(restart, rank, seq, NO_STEP if step is None else step, file, offset, len(line))
