"""Rows as flat tables: one column for each number, however deep it stood in what was reported."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from det_core.journal import Row

COLUMNS = ("group", "steps_completed", "batch", "time", "restart", "rank", "superseded")
"""The columns that are not metrics, those that are always there and those that are not."""


def flat(row: Row, *, superseded: bool = False, batches: bool = False) -> dict[str, Any]:
    """A row as one level of columns.

    Nested dicts become columns with dots in their names, as ``gpu.memory``. A metric that is called like one
    of :data:`COLUMNS` is found as ``metrics.<name>``.

    Args:
        row: the row.
        superseded: with a column that says whether it was superseded.
        batches: with an empty column for the number of the batch.
    """
    columns: dict[str, Any] = {"group": row.group, "steps_completed": row.steps_completed}
    if batches:
        columns["batch"] = None
    columns.update(time=row.time, restart=row.restart, rank=row.rank)
    if superseded:
        columns["superseded"] = row.superseded
    _spread(columns, "", row.metrics)
    return columns


def flat_batches(row: Row, *, superseded: bool = False) -> Iterator[dict[str, Any]]:
    """The batch metrics of a row as rows of their own, numbered from 0."""
    for number, batch in enumerate(row.batch_metrics or ()):
        columns: dict[str, Any] = {"group": row.group, "steps_completed": row.steps_completed, "batch": number}
        columns.update(time=row.time, restart=row.restart, rank=row.rank)
        if superseded:
            columns["superseded"] = row.superseded
        _spread(columns, "", batch)
        yield columns


def spread(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with nested dicts as names with dots."""
    columns: dict[str, Any] = {}
    _spread(columns, "", metrics, reserved=())
    return columns


def _spread(
    columns: dict[str, Any], prefix: str, metrics: Mapping[str, Any], reserved: Container[str] = COLUMNS
) -> None:
    for key, value in metrics.items():
        name = prefix + key
        if isinstance(value, dict) and value:
            _spread(columns, name + ".", value, reserved)
            continue
        if name in reserved:
            name = "metrics." + name
        while name in columns:  # {"a.b": 1, "a": {"b": 2}}
            name += "_"
        columns[name] = value
