"""Alternation of contenders, and statistics of their figures."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Figures = dict[str, float]
"""Figures of one turn of a contender, by name."""


def alternate(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Give each contender a turn in every round, in rotating order, and return their results by round."""
    # Rotating: load of the machine, and what one contender leaves in its caches, then meets all of them alike.
    names = list(contenders)
    found = {name: list[T]() for name in contenders}
    for number in range(rounds if names else 0):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(contenders[name]())
            print(f"round {number + 1} of {rounds}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def median(found: Sequence[Figures], name: str) -> float:
    """Return the median of one figure over the rounds."""
    return statistics.median(each[name] for each in found)


def best(found: Sequence[Figures], name: str) -> float:
    """Return the minimum of one figure, for times, to which other processes can only add."""
    return min(each[name] for each in found)


def ratio(these: Sequence[Figures], those: Sequence[Figures], name: str) -> float:
    """Return the median ratio of one figure, round by round."""
    # Not the ratio of the medians: those may be of rounds that met different loads.
    return statistics.median(a[name] / b[name] for a, b in zip(these, those, strict=True))
