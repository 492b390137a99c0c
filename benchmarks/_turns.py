"""Contenders in turn, and what is made of their figures."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Figures = dict[str, float]
"""What one turn of a contender has found, by name."""


def alternate(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Let each have a turn in every round, in an order that rotates; what they found, round by round.

    What else the machine does, and what one leaves to the next, then meets all of them alike.
    """
    names, found = list(contenders), {name: list[T]() for name in contenders}
    for number in range(rounds if names else 0):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(contenders[name]())
            print(f"round {number + 1} of {rounds}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def median(found: Sequence[Figures], name: str) -> float:
    """The median of one figure over the rounds."""
    return statistics.median(each[name] for each in found)


def best(found: Sequence[Figures], name: str) -> float:
    """The least of one figure: of a time, where whatever else runs can only add to it."""
    return min(each[name] for each in found)


def ratio(these: Sequence[Figures], those: Sequence[Figures], name: str) -> float:
    """These to those: the median of the quotients of each round."""
    return statistics.median(a[name] / b[name] for a, b in zip(these, those, strict=True))
