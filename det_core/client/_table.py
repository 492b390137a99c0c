"""Tables of metrics: one column for each number, however deep it was nested in a report."""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core.journal import Row

COLUMNS = ("group", "steps_completed", "batch", "time", "restart", "rank", "superseded")
"""Columns that are not metrics, optional ones included."""


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame, or as they are if pandas is not installed."""
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    # Without columns= a table of no rows would have none, and pandas sorts those of later rows.
    return pandas.DataFrame.from_records(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))


def flatten_row(row: Row, *, superseded: bool = False, batches: bool = False) -> dict[str, Any]:
    """Return a row as one level of columns.

    Nested dicts become columns with dots in their names, as ``gpu.memory``. A metric with the name of one of
    :data:`COLUMNS` becomes ``metrics.<name>``.

    Args:
        row: Row of a journal.
        superseded: Whether to add a column that says whether it is superseded.
        batches: Whether to add an empty column for the number of the batch.
    """
    columns = _head(row, superseded, {"batch": None} if batches else {})
    _spread(columns, "", row.metrics)
    return columns


def flatten_batches(row: Row, *, superseded: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the batch metrics of a row as rows of their own, numbered from 0."""
    for number, batch in enumerate(row.batch_metrics or ()):
        columns = _head(row, superseded, {"batch": number})
        _spread(columns, "", batch)
        yield columns


def spread(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with nested dicts as names with dots."""
    columns: dict[str, Any] = {}
    _spread(columns, "", metrics, reserved=())
    return columns


def _head(row: Row, superseded: bool, batch: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {"group": row.group, "steps_completed": row.steps_completed, **batch}
    columns.update(time=row.time, restart=row.restart, rank=row.rank)
    if superseded:
        columns["superseded"] = row.superseded
    return columns


def _spread(
    columns: dict[str, Any], prefix: str, metrics: Mapping[str, Any], reserved: Container[str] = COLUMNS
) -> None:
    for key, value in metrics.items():
        name = prefix + key
        # An empty dict stays a value: without it the report would leave no trace.
        if isinstance(value, dict) and value:
            _spread(columns, name + ".", value, reserved)
            continue
        if name in reserved:
            name = "metrics." + name
        while name in columns:  # {"a.b": 1, "a": {"b": 2}}
            name += "_"
        columns[name] = value
