"""What was reported at which step, so that a second value for the same group, step and key is found out.

Steps of a group mostly grow, and a step larger than all before it cannot repeat one: that case costs a
comparison. For the others the earlier rows are found again in three places, so that memory stays bounded
however long the run:

- the latest step's values are kept;
- rows written in order of their steps are found in the process's own file, through an index of one entry for
  about 64 KB of file;
- rows written out of order are noted in a private temporary database, which SQLite keeps in memory while it
  is small.

See :class:`Group` for what the fast path touches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from det_core.journal import _line

BLOCK = 65536
BATCH = "\0batch_metrics"
"""Stands for the batch metrics among the keys of a step: they are given once or not at all."""

Read = Callable[[int, int, int], bytes]


class Group:
    """The steps of one group.

    Attributes:
        last: the largest step reported so far.
        line: the line that first reported ``last``, until its values are asked for.
        written: the largest step in a file so far.
        block_end: where in the current file the next index entry is due.
    """

    __slots__ = (
        "_blocks",
        "_cache",
        "_files",
        "_late",
        "_steps",
        "block_end",
        "last",
        "line",
        "name",
        "values",
        "written",
    )

    def __init__(self, name: str, late: Late) -> None:
        self.name = name
        self.last = -1
        self.line: bytes | None = None
        self.values: dict[str, Any] | None = {}
        self.written = -1
        self.block_end = 0
        self._late = late
        self._blocks, self._steps, self._files = array("q"), array("q"), array("i")
        self._cache: tuple[int, dict[int, dict[str, Any]]] = (-1, {})

    def placed(self, step: int, line: bytes, file: int, offset: int) -> None:
        """A row is in a file now: note how it is found again."""
        if step < self.written:
            self._late.add(self.name, step, values_of(_line.decode(line)))
            return
        self.written = step
        if offset >= self.block_end:
            self.index(file, offset, step)

    def known(self, step: int, kept: list[bytes], read: Read) -> dict[str, Any]:
        """The values of an earlier step, by key, wherever its rows are."""
        if step == self.last:
            return self.latest()
        found = self.in_order(step, read)
        found.update(self._late.find(self.name, step))
        for line in kept:
            found.update(values_of(_line.decode(line)))
        return found

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Note further values of a step that is not larger than ``last``."""
        if step == self.last:
            self.latest().update(values)
        else:
            self._late.add(self.name, step, values)

    def latest(self) -> dict[str, Any]:
        """The values of step ``last`` by key."""
        if self.values is None:
            assert self.line is not None
            self.values = values_of(_line.decode(self.line))
        return self.values

    def index(self, file: int, offset: int, step: int) -> None:
        """Note a row written in order that starts a block."""
        self._blocks.append(offset)
        self._steps.append(step)
        self._files.append(file)
        self.block_end = offset + BLOCK

    def in_order(self, step: int, read: Read) -> dict[str, Any]:
        """The values of an earlier step among the rows written in order."""
        found: dict[str, Any] = {}
        first = max(bisect_left(self._steps, step) - 1, 0)
        for block in range(first, bisect_right(self._steps, step)):
            found.update(self._block(block, read).get(step, {}))
        return found

    def _block(self, block: int, read: Read) -> dict[int, dict[str, Any]]:
        whole = block + 1 < len(self._blocks)
        if self._cache[0] == block and whole:
            return self._cache[1]
        steps: dict[int, dict[str, Any]] = {}
        data = _lines_of(self._files[block], self._blocks[block], read)
        for line in data:
            record = _line.decode(line)
            if record and record["kind"] == "metrics" and record["group"] == self.name:
                step = record["steps_completed"]
                if step is not None:
                    steps.setdefault(step, {}).update(values_of(record))
        if whole:
            self._cache = (block, steps)
        return steps


class Late:
    """Rows written out of order: (group, step, key) -> value, in a temporary database made when needed."""

    def __init__(self) -> None:
        self._db: Any = None

    def add(self, group: str, step: int, values: dict[str, Any]) -> None:
        """Note the values of a step."""
        import pickle

        rows = [(group, step, key, pickle.dumps(value, protocol=5)) for key, value in values.items()]
        if self._db is None:
            self._db = _database()
        self._db.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", rows)

    def find(self, group: str, step: int) -> dict[str, Any]:
        """The noted values of a step."""
        import pickle

        if self._db is None:
            return {}
        rows = self._db.execute("SELECT key, value FROM seen WHERE grp = ? AND step = ?", (group, step))
        return {key: pickle.loads(value) for key, value in rows}

    def close(self) -> None:
        """Forget everything."""
        if self._db is not None:
            self._db.close()
            self._db = None


def _database() -> Any:
    import sqlite3

    db = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # no name: private, deleted by SQLite
    db.execute("PRAGMA journal_mode = OFF")
    db.execute(
        "CREATE TABLE seen (grp TEXT, step INTEGER, key TEXT, value BLOB, PRIMARY KEY (grp, step, key)) WITHOUT ROWID"
    )
    return db


def same(a: Any, b: Any) -> bool:
    """Equality in which NaN equals NaN, at any depth."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


def values_of(record: dict[str, Any] | None) -> dict[str, Any]:
    """The metrics of a row by key, its batch metrics among them."""
    if record is None:
        return {}
    values: dict[str, Any] = dict(record["metrics"])
    if record.get("batch_metrics") is not None:
        values[BATCH] = record["batch_metrics"]
    return values


def _lines_of(file: int, offset: int, read: Read) -> list[bytes]:
    """The lines that start within one block, the last of them whole."""
    try:
        data = read(file, offset, BLOCK)
        while data and not data.endswith(b"\n"):
            more = read(file, offset + len(data), BLOCK)
            end = more.find(b"\n") + 1
            data += more[:end] if end else more
            if not more:
                break
    except OSError:  # the file is gone: what was in it cannot be compared any more
        return []
    return data.split(b"\n")
