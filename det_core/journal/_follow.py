"""Reading only what is new in the journals of a run, and of that only some kinds of records."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from det_core.journal._folder import journal_files

CHUNK = 1 << 20
"""Bytes that are looked through at a time, while no other thread runs."""


class Follower:
    """Gives the records of some kinds that were written since it was last asked.

    It looks for them as text, so that the rows of a long run cost next to nothing, also the first time.

    Args:
        folder: the run's folder.
        kinds: such as ``checkpoint``, ``restore``.
        group: also the metrics rows of this group.
    """

    def __init__(self, folder: Path, kinds: Collection[str] = (), *, group: str | None = None) -> None:
        self._folder = folder
        self._kinds = frozenset(kinds)
        self._group = group
        self._marks = [_mark("kind", kind) for kind in self._kinds]
        if group is not None:
            self._marks.append(_mark("group", group))
        self._read: dict[Path, int] = {}

    def new(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Restart, rank and record of each that is new, in no particular order.

        A record may come twice, with the same ``seq``, if its file was lost and copied.
        """
        return [
            (restart, rank, record)
            for restart, rank, _, path in journal_files(self._folder)
            for line in self._lines(path)
            if (record := self._wanted(line)) is not None
        ]

    def _wanted(self, line: bytes) -> dict[str, Any] | None:
        from det_core.journal._line import decode

        record = decode(line)
        if record is None:
            return None
        wanted = record["group"] == self._group if record["kind"] == "metrics" else record["kind"] in self._kinds
        return record if wanted else None

    def _lines(self, path: Path) -> Iterator[bytes]:
        """The new lines of a file with any of the marks; one that is not ended yet is left for the next time."""
        try:
            with open(path, "rb") as f:
                f.seek(self._read.get(path, 0))
                rest = b""
                while chunk := f.read(CHUNK):
                    whole, newline, rest = (rest + chunk).rpartition(b"\n")
                    yield from self._marked(whole + newline)
                self._read[path] = f.tell() - len(rest)
        except FileNotFoundError:
            return

    def _marked(self, text: bytes) -> Iterator[bytes]:
        starts: dict[int, bytes] = {}
        for mark in self._marks:
            at = text.find(mark)
            while at >= 0:
                start, end = text.rfind(b"\n", 0, at) + 1, text.index(b"\n", at)
                starts[start] = text[start:end]
                at = text.find(mark, end)
        return (starts[start] for start in sorted(starts))


def _mark(key: str, value: str) -> bytes:
    """How a line of ours has ``value`` under ``key``."""
    import orjson

    return orjson.dumps({key: value})[1:-1]
