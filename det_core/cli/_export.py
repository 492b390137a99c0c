"""Export of a run's metrics as csv, jsonl or parquet, row by row."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from det_core._json import encode_nonfinite
from det_core._standalone.files import replacing

if TYPE_CHECKING:
    from det_core.client import Run
    from det_core.journal import Row

BAR_FROM_ROWS = 20_000
"""Rows from which on a terminal shows a progress bar."""
ROW_GROUP_ROWS = 50_000
"""Rows that are held in memory while parquet is written."""


class Table:
    """Rows to export, which can be read several times.

    Attributes:
        conflicts: metrics of which ranks reported different values, with the steps and restarts where they did.
    """

    def __init__(self, run: Run, group: str | None, superseded: bool, batches: bool) -> None:
        self._run = run
        self._group = group
        self.superseded = superseded
        self.batches = batches
        self.conflicts: dict[str, set[tuple[int | None, int]]] = {}

    def rows(self, title: str) -> Iterator[Row]:
        """Yield the rows; on a terminal, if there are many, beside a progress bar."""
        for row in self._with_progress(title):
            for key in row.conflicts:
                self.conflicts.setdefault(f"{row.group}.{key}", set()).add((row.steps_completed, row.restart))
            yield row

    def flat_rows(self, title: str) -> Iterator[dict[str, Any]]:
        """Yield each row, and each of its batches, as columns."""
        from det_core.client._table import flatten_batches, flatten_row

        for row in self.rows(title):
            yield flatten_row(row, superseded=self.superseded, batches=self.batches)
            if self.batches:
                yield from flatten_batches(row, superseded=self.superseded)

    def _with_progress(self, title: str) -> Iterable[Row]:
        groups = self._run.groups()
        if self._group is not None:
            groups = [self._group]
        total = sum(self._run.record.count(group) for group in groups)
        rows = self._run.rows(self._group, superseded=self.superseded, batches=self.batches)
        if total < BAR_FROM_ROWS or not sys.stderr.isatty():
            return rows
        from rich.console import Console
        from rich.progress import track

        return track(rows, description=title, total=total, console=Console(stderr=True), transient=True)


def write(table: Table, kind: str, output: str | None) -> None:
    """Write a table to stdout, or to a file that appears when it is complete."""
    if kind == "parquet" and output is None and sys.stdout.isatty():
        raise ValueError("parquet is not for a terminal: name a file with --output")
    with _open_output(output) as out:
        {"csv": _write_csv, "jsonl": _write_jsonl, "parquet": _write_parquet}[kind](table, out)


@contextmanager
def _open_output(output: str | None) -> Iterator[IO[bytes]]:
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(output)
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: no folder {path.parent}")
    with replacing(path, durable=False) as staging, open(staging, "wb") as out:
        yield out


def _write_csv(table: Table, out: IO[bytes]) -> None:
    """Write a line for each row under a head; lists as JSON, what a row lacks empty."""
    # Read twice: a column that begins in the last row belongs into the head.
    columns = list(dict.fromkeys(name for row in table.flat_rows("reading") for name in row))
    # Without translation: csv writes its own line ends, on each platform the same.
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    try:
        write_csv(columns or ["group", "steps_completed"], table.flat_rows("writing"), text)
    finally:
        text.detach()  # else its destructor would close stdout


def write_csv(columns: list[str], rows: Iterable[dict[str, Any]], out: IO[str]) -> None:
    """Write rows as CSV with every digit of each number."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])


def _cell(value: Any) -> Any:
    """Return a value as CSV has it."""
    if value is None:
        return ""
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)  # reads back as the same number
        return encode_nonfinite(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return value


def _write_jsonl(table: Table, out: IO[bytes]) -> None:
    for row in table.rows("writing"):
        out.write(row.line(superseded=table.superseded))


def _write_parquet(table: Table, out: IO[bytes]) -> None:
    """Write a column for each metric, of the narrowest type that holds all its values."""
    from det_core._optional import require

    pyarrow = require("pyarrow", extra="data", purpose="export to parquet")
    parquet = require("pyarrow.parquet", extra="data", purpose="export to parquet")
    kinds: dict[str, str] = {}
    for row in table.flat_rows("reading"):
        for name, value in row.items():
            kinds[name] = _widen(kinds.get(name, "null"), value)
    types = {
        "null": pyarrow.null(),
        "bool": pyarrow.bool_(),
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "text": pyarrow.string(),
        "json": pyarrow.string(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in kinds.items()])
    rows = table.flat_rows("writing")
    with parquet.ParquetWriter(out, schema) as writer:
        while batch := list(islice(rows, ROW_GROUP_ROWS)):
            arrays = [
                pyarrow.array([_convert(row.get(name), kind) for row in batch], types[kind])
                for name, kind in kinds.items()
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _widen(kind: str, value: Any) -> str:
    """Return the type that holds the values of ``kind``, and ``value``."""
    if value is None:
        return kind
    if isinstance(value, bool):
        new = "bool"
    elif isinstance(value, int):
        new = "int" if value < 2**63 else "float"  # int64 ends there
    else:
        new = {float: "float", str: "text"}.get(type(value), "json")
    if kind in ("null", new):
        return new
    if {kind, new} == {"int", "float"}:
        return "float"
    return "json"  # a text and a number, say


def _convert(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "json":
        return json.dumps(value, ensure_ascii=False)
    if kind == "float":
        return float(value)  # Arrow takes no int in a column of floats that it cannot hold exactly
    return value
