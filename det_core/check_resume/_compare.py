"""Comparison of two trainings: pure functions over what was read of them."""

from __future__ import annotations

import math
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from det_core._json import equal_json, is_number
from det_core.check_resume._records import Training, flatten

_TIMES = re.compile(
    r"(^|[^a-z])(times?|sec|secs|seconds?|ms|duration|elapsed|eta|wall|throughput|fps|speed|hours|minutes|memory)($|[^a-z])"
    r"|per_?sec|per_s$|/s$|_s$"
)
"""Keys whose values are measured anew by every run."""


@dataclass(frozen=True)
class Change:
    """A value that differs."""

    group: str
    step: int
    key: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.group} step {self.step}: {self.key} {self.found!r} instead of {self.expected!r}"


@dataclass(frozen=True)
class Difference:
    """Differences between the rows of a training and those of the undisturbed one.

    Attributes:
        missing: groups and steps that only the undisturbed one has, by step.
        extra: groups and steps that it has not, by step.
        changed: values that differ, by step.
        is_reordered: whether the same rows were reported in another order.
    """

    missing: tuple[tuple[str, int], ...] = ()
    extra: tuple[tuple[str, int], ...] = ()
    changed: tuple[Change, ...] = ()
    is_reordered: bool = False

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.changed or self.is_reordered)

    def missing_of(self, group: str) -> list[int]:
        """Return the missing steps of a group."""
        return [step for name, step in self.missing if name == group]

    def extra_of(self, group: str) -> list[int]:
        """Return the surplus steps of a group."""
        return [step for name, step in self.extra if name == group]


def is_time(key: str) -> bool:
    """Return whether a metric is by its name a measured time, speed or size of memory."""
    return _TIMES.search(key.lower()) is not None


def compare(expected: Training, found: Training, *, rtol: float = 0.0, ignored: Set[str] = frozenset()) -> Difference:
    """Compare the rows of two trainings.

    Args:
        expected: the undisturbed one.
        found: the other.
        rtol: relative tolerance of numbers.
        ignored: keys that are not compared, beside times.
    """
    cut = _cut_rows(expected, found, rtol=rtol, ignored=ignored)
    before = {(group, step) for group, rows in expected.rows.items() for step in rows} - cut
    after = {(group, step) for group, rows in found.rows.items() for step in rows} - cut
    common = before & after
    changed = [
        change
        for group, step in sorted(common, key=lambda place: (place[1], place[0]))
        for change in _changes(
            group, step, expected.rows[group][step], found.rows[group][step], rtol=rtol, ignored=ignored
        )
    ]
    orders = [[place for place in training.order if place in common] for training in (expected, found)]
    return Difference(
        tuple(sorted(before - after, key=lambda place: place[1])),
        tuple(sorted(after - before, key=lambda place: place[1])),
        tuple(changed),
        orders[0] != orders[1],
    )


def _cut_rows(expected: Training, found: Training, *, rtol: float, ignored: Set[str]) -> set[tuple[str, int]]:
    """Return the rows into which a stop has split an averaged row, if their batches are equal to those of that row.

    A trial class reports averages at the stop, and those of the remaining batches at the next boundary.
    """
    cut: set[tuple[str, int]] = set()
    for group, rows in found.rows.items():
        parts: list[tuple[str, int]] = []
        for step in sorted(rows):
            parts.append((group, step))
            if step not in expected.rows.get(group, {}):
                continue
            whole = expected.batches.get((group, step), [])
            batches = [batch for part in parts for batch in found.batches.get(part, [])]
            if len(parts) > 1 and len(whole) == len(batches) > 0:
                changes = _changes(
                    group, step, dict(flatten(whole)), dict(flatten(batches)), rtol=rtol, ignored=ignored
                )
                if not changes:
                    cut.update(parts)
            parts = []
    return cut


def _changes(
    group: str, step: int, before: dict[str, Any], after: dict[str, Any], *, rtol: float, ignored: Set[str]
) -> list[Change]:
    keys = [key for key in {**before, **after} if not is_time(key) and key not in ignored]
    return [
        Change(group, step, key, before.get(key), after.get(key))
        for key in keys
        if key not in before or key not in after or not is_close(before[key], after[key], rtol)
    ]


def is_close(a: Any, b: Any, rtol: float) -> bool:
    """Return whether two values are equal, numbers within a relative tolerance."""
    if rtol and is_number(a) and is_number(b) and math.isclose(a, b, rel_tol=rtol):
        return True
    return equal_json(a, b)
