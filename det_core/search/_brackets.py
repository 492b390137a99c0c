"""How trials and slots are shared among brackets, and how long their rungs are (wire contract 12.4, 12.7).

The methods: L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (ASHA), and L. Li et
al., "Hyperband", JMLR 18, 2018 (brackets). What is done in float64 here, truncation included, is part of the contract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from det_core.search._lengths import units_of

DEFAULT_CONCURRENT = 16
MODES = ("aggressive", "standard", "conservative")


@dataclass(frozen=True)
class Plan:
    """One bracket."""

    max_trials: int
    """How many trials it has in all, those with hyperparameters that cannot be trained not counted."""
    concurrent: int
    """How many it starts with, and keeps up until there are ``max_trials``."""
    lengths: tuple[int, ...]
    """How long a trial has trained on each rung, in units."""


def plans(searcher: Mapping[str, Any]) -> list[Plan]:
    """The brackets that a configuration of ``async_halving`` or ``adaptive_asha`` asks for.

    Raises:
        ValueError: a value is out of range.
    """
    length = units_of(searcher["max_time"] if timed(searcher) else searcher["max_length"])
    trials, divisor = int(searcher["max_trials"]), searcher.get("divisor", 4)
    concurrent = searcher.get("max_concurrent_trials", DEFAULT_CONCURRENT)
    if length < 1 or trials < 1 or divisor <= 1 or concurrent < 0:
        raise ValueError(
            f"searcher: max_length {length} and max_trials {trials} must be at least 1, divisor {divisor} above 1, "
            f"max_concurrent_trials {concurrent} at least 0"
        )
    if searcher["name"] == "async_halving":
        rungs = int(searcher["num_rungs"])
        first = min(concurrent, trials) if concurrent else int(max(1, min(float(divisor) ** (rungs - 1), trials)))
        return [Plan(trials, first, rung_lengths(length, divisor, rungs))]
    counts = list(searcher.get("bracket_rungs") or ()) or candidates(
        searcher.get("mode", "standard"), searcher.get("max_rungs", 5), length, divisor, trials
    )
    counts.sort(reverse=True)
    shares = share_trials(counts, divisor, trials)
    slots = share_slots(concurrent, shares, divisor)
    return [
        Plan(share, min(slot, share), rung_lengths(length, divisor, rungs))
        for rungs, share, slot in zip(counts, shares, slots, strict=True)
    ]


def timed(searcher: Mapping[str, Any]) -> bool:
    """Whether validations drive it, by the metric ``time_metric``."""
    return searcher.get("time_metric") is not None and searcher.get("max_time") is not None


def rung_lengths(length: int, divisor: float, rungs: int) -> tuple[int, ...]:
    """How long a trial has trained on each rung."""
    if rungs < 1:
        raise ValueError(f"searcher: the number of rungs must be at least 1, and is {rungs}")
    return tuple(max(int(length / divisor ** (rungs - 1 - i)), 1) for i in range(rungs))


def candidates(mode: str, max_rungs: int, length: int, divisor: float, trials: int) -> list[int]:
    """How many rungs each bracket has."""
    if mode not in MODES:
        raise ValueError(f"searcher.mode is {mode!r}; there are {', '.join(MODES)}")
    base = math.log(divisor)
    most = min(max_rungs, int(math.log(length) / base) + 1, int(math.log(trials) / base) + 1)
    least = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[mode]
    return list(range(least, most + 1))


def share_trials(counts: list[int], divisor: float, trials: int) -> list[int]:
    """How many trials each bracket has, so that all brackets cost about the same."""
    weights = [float(divisor) ** (rungs - 1) / rungs for rungs in counts]
    total = sum(weights)
    shares = [max(int(weight / total * trials), 1) for weight in weights]
    shares[0] += max(trials - sum(shares), 0)
    return shares


def share_slots(concurrent: int, shares: list[int], divisor: float) -> list[int]:
    """How many trials of each bracket run at a time."""
    if concurrent == 0:
        return [max(shares[-1], int(divisor))] * len(shares)
    each, more = divmod(max(concurrent, len(shares)), len(shares))
    return [each + (i < more) for i in range(len(shares))]
