"""Running totals of a group's numbers: a few passes in C per key and batch, so that writing stays fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypedDict

Tally = list[Any]
"""Of one key: [values, finite values, their sum, smallest, largest, last value]."""


class KeySummary(TypedDict):
    """The numbers of one key. Those that are not finite are counted, but are in no sum, min, max or mean."""

    count: int
    sum: float
    min: float | None
    max: float | None
    mean: float | None
    last: float
    type: str


def take_in(tallies: dict[str, Tally], rows: Sequence[Mapping[str, Any]]) -> None:
    """Count rows, the oldest first."""
    first = rows[0]
    if len(rows) == 1 or all(row.keys() == first.keys() for row in rows):
        for key in first:
            _column(tallies, key, [row[key] for row in rows])
    else:
        for key in {key: None for row in rows for key in row}:
            _column(tallies, key, [row[key] for row in rows if key in row])


def summary(tallies: Mapping[str, Tally]) -> dict[str, KeySummary]:
    """The totals as they are shown."""
    return {
        key: KeySummary(
            count=count,
            sum=total,
            min=low,
            max=high,
            mean=total / finite if finite else None,
            last=last,
            type="number",
        )
        for key, (count, finite, total, low, high, last) in tallies.items()
    }


def _column(tallies: dict[str, Tally], key: str, values: Sequence[Any]) -> None:
    if not set(map(type, values)) <= {float, int}:
        values = [value for value in values if type(value) in (float, int)]
        if not values:
            return
    total = sum(values)
    finite: Sequence[Any] = values
    if not isfinite(total):
        finite = [value for value in values if isfinite(value)]
        total = sum(finite)
    old = tallies.get(key)
    if old is None:
        old = tallies[key] = [0, 0, 0.0, None, None, None]
    old[0] += len(values)
    old[1] += len(finite)
    old[2] += total
    if finite:
        old[3] = min(finite) if old[3] is None else min(old[3], *finite)
        old[4] = max(finite) if old[4] is None else max(old[4], *finite)
    old[5] = values[-1]
