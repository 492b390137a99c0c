"""Export of a run's metrics as csv, jsonl or parquet, row by row."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from det_core._json import encode_nonfinite
from det_core._standalone.files import replacing
from det_core.cli._output import progress_bar

if TYPE_CHECKING:
    from det_core.client import Run
    from det_core.journal import Row

BAR_FROM_ROWS = 20_000
"""Rows from which on a terminal shows a progress bar."""


class Table:
    """Rows to export, which can be read several times.

    Attributes:
        conflicts: metrics of which ranks reported different values, with the restarts and steps where they did.
    """

    def __init__(self, run: Run, group: str | None, superseded: bool, batches: bool) -> None:
        self._run = run
        self._groups = run.groups() if group is None else [group]
        self.superseded = superseded
        self.batches = batches
        self.conflicts: dict[str, set[tuple[int, int]]] = {}

    def rows(self, title: str) -> Iterator[Row]:
        """Yield the rows; on a terminal, if there are many, beside a progress bar."""
        record = self._run.record
        total = sum(map(record.count, self._groups))
        with progress_bar(title, total, unit="rows", least=BAR_FROM_ROWS) as advance:
            for group in self._groups:
                for row in self._run.rows(group, superseded=self.superseded, batches=self.batches):
                    for key in row.conflicts:
                        self.conflicts.setdefault(f"{group}.{key}", set()).add((row.restart, row.steps_completed or 0))
                    advance(1)
                    yield row

    def flat_rows(self, title: str) -> Iterator[dict[str, Any]]:
        """Yield each row, and each of its batches, as columns."""
        from det_core.client._table import flatten_batches, flatten_row

        for row in self.rows(title):
            yield flatten_row(row, superseded=self.superseded, batches=self.batches)
            if self.batches:
                yield from flatten_batches(row, superseded=self.superseded)


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
    """Write a column for each metric: of one type if its values have one, else numbers as floats, or JSON."""
    from det_core._optional import require

    pyarrow = require("pyarrow", extra="data", purpose="export to parquet")
    parquet = require("pyarrow.parquet", extra="data", purpose="export to parquet")
    rows = list(table.flat_rows("reading"))

    def column(name: str) -> Any:
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        try:
            if not kinds & {list, dict}:
                return pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):  # a text and a number, or an int beyond 64 bits
            if kinds <= {int, float}:
                return pyarrow.array(_convert(values, float))
        return pyarrow.array(_convert(values, partial(json.dumps, ensure_ascii=False)))

    columns = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(pyarrow.table({name: column(name) for name in columns}), out)


def _convert(values: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values]
