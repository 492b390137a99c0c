"""The three formats of an export, each written row by row."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from det_core._json import encode_nonfinite

if TYPE_CHECKING:
    from det_core.cli.runs._export import Table

ROW_GROUP = 50_000
"""Rows that are held in memory while parquet is written."""


def write_csv(table: Table, out: IO[bytes]) -> None:
    """One line a row under a head. Lists are JSON; what a row lacks is empty."""
    columns = list(dict.fromkeys(name for row in table.flat("reading") for name in row))
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns or ["group", "steps_completed"])
        for row in table.flat("writing"):
            writer.writerow([cell(row.get(name)) for name in columns])
    finally:
        text.detach()


def write_jsonl(table: Table, out: IO[bytes]) -> None:
    """One object a row."""
    for row in table.rows("writing"):
        out.write(row.line(superseded=table.superseded))


def write_parquet(table: Table, out: IO[bytes]) -> None:
    """A column for each metric, of the narrowest type that holds all its values."""
    from det_core._optional import require

    pyarrow = require("pyarrow", extra="data", purpose="export to parquet")
    parquet = require("pyarrow.parquet", extra="data", purpose="export to parquet")
    kinds: dict[str, str] = {}
    for row in table.flat("reading"):
        for name, value in row.items():
            kinds[name] = _wider(kinds.get(name, "null"), value)
    types = {
        "null": pyarrow.null(),
        "bool": pyarrow.bool_(),
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "text": pyarrow.string(),
        "json": pyarrow.string(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in kinds.items()])
    with parquet.ParquetWriter(out, schema) as writer:
        for rows in _batched(table.flat("writing"), ROW_GROUP):
            arrays = [
                pyarrow.array([_as_kind(row.get(name), kind) for row in rows], types[kind])
                for name, kind in kinds.items()
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def cell(value: Any) -> Any:
    """A value as it stands in a CSV file."""
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else encode_nonfinite(value)
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return value


def _wider(kind: str, value: Any) -> str:
    """The kind that holds what ``kind`` holds, and ``value``."""
    if value is None:
        return kind
    if isinstance(value, bool):
        new = "bool"
    elif isinstance(value, int):
        new = "int" if value < 2**63 else "float"
    else:
        new = {float: "float", str: "text"}.get(type(value), "json")
    if kind in ("null", new):
        return new
    return "float" if {kind, new} == {"int", "float"} else "json"


def _as_kind(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "json":
        return json.dumps(value, ensure_ascii=False)
    return float(value) if kind == "float" else value


def _batched(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
