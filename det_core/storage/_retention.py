"""Retention: pure policies that decide which checkpoints of a run stay, and rules that hold whatever a policy says."""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(?:\s*\d+(?:\.\d+)?\s*[smhdw])+\s*")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint of a run, as policies see it."""

    storage_id: str
    steps_completed: int
    time: float
    """Time of the commit in seconds since the epoch."""
    restart: int = 0
    ordinal: int = 0
    """Number of the checkpoint among those of its restart."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Known values of :attr:`RetentionPolicy.metrics`."""
    run_id: str = ""
    damaged: bool = False
    """Whether files are known to be missing or to have another size."""

    @property
    def age(self) -> tuple[int, int, float, str]:
        """Sort key from the oldest to the newest of a run, by restarts first and not by the clock, which may jump."""
        return self.restart, self.ordinal, self.time, self.storage_id


class RetentionPolicy(abc.ABC):
    """Policy that decides which checkpoints of a run stay. ``a | b`` keeps what either keeps."""

    @property
    def metrics(self) -> frozenset[str]:
        """Validation metrics that the policy needs; others are not looked up."""
        return frozenset()

    @abc.abstractmethod
    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """Return the storage IDs to keep.

        Args:
            candidates: all complete checkpoints of one run, in any order.
            now: current time in seconds since the epoch.
        """

    def parts(self) -> tuple[RetentionPolicy, ...]:
        """Return the policies that this one is a union of."""
        return (self,)

    def __or__(self, other: object) -> AnyOf:
        return AnyOf(self, other) if isinstance(other, RetentionPolicy) else NotImplemented


@dataclass(frozen=True)
class KeepLatest(RetentionPolicy):
    """Keep the newest ``n``."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLatest(n)", self.n)

    def __str__(self) -> str:
        if self.n == 1:
            return "the latest"
        return f"the latest {self.n}"

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """Return the last ``n`` that were committed."""
        return _ids(sorted(candidates, key=lambda c: c.age)[-self.n :])


@dataclass(frozen=True)
class KeepBest(RetentionPolicy):
    """Keep the ``n`` with the best value of a metric; of equal ones the newer.

    A checkpoint's value is the validation metric reported for its ``steps_completed``, else a number of that name in
    its own metadata. One without a value, or with NaN, is never among the best.

    Args:
        n: number of checkpoints.
        metric: name of the metric; ``a.b`` for a metric ``b`` within ``a``.
        smaller_is_better: whether the smallest value is the best.
    """

    n: int
    metric: str
    smaller_is_better: bool = True

    def __post_init__(self) -> None:
        _check_count("KeepBest(n)", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"KeepBest(metric={self.metric!r}): expected the name of a validation metric")
        if not isinstance(self.smaller_is_better, bool):
            raise ValueError(f"KeepBest(smaller_is_better={self.smaller_is_better!r}): expected True or False")

    def __str__(self) -> str:
        best = "the best"
        if self.n > 1:
            best += f" {self.n}"
        order = "smallest" if self.smaller_is_better else "largest"
        return f"{best} by {order} {self.metric}"

    @property
    def metrics(self) -> frozenset[str]:
        """The one metric."""
        return frozenset([self.metric])

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """Return the ``n`` with the best values."""
        sign = -1 if self.smaller_is_better else 1
        # NaN sorts anywhere.
        valued = [c for c in candidates if not math.isnan(c.metrics.get(self.metric, math.nan))]
        return _ids(sorted(valued, key=lambda c: (sign * c.metrics[self.metric], c.age))[-self.n :])


@dataclass(frozen=True)
class KeepEvery(RetentionPolicy):
    """Keep, of each ``steps`` steps, the first checkpoint at or after the multiple, and one of step 0.

    With ``KeepEvery(1000)`` and checkpoints of the steps 600, 1200, 1800, 2400 these are 1200 and 2400.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery(steps)", self.steps)

    def __str__(self) -> str:
        return f"every {self.steps} steps"

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """Return the first at or after each multiple; of several with equal steps the newest."""
        first: dict[int, Candidate] = {}
        for c in sorted(candidates, key=lambda c: c.age, reverse=True):
            multiple = c.steps_completed // self.steps
            if multiple == 0 and c.steps_completed != 0:
                continue
            if multiple not in first or c.steps_completed < first[multiple].steps_completed:
                first[multiple] = c
        return _ids(first.values())


@dataclass(frozen=True)
class KeepWithin(RetentionPolicy):
    """Keep those committed within a duration before now.

    Args:
        duration: seconds, a text such as ``"7d"`` or ``"1d 12h"`` (s, m, h, d, w), or a timedelta.
    """

    duration: float | str | timedelta

    def __post_init__(self) -> None:
        duration_seconds(self.duration)

    def __str__(self) -> str:
        if isinstance(self.duration, str):
            return f"newer than {self.duration}"
        seconds = duration_seconds(self.duration)
        unit = max((u for u in SECONDS if SECONDS[u] <= seconds), key=lambda u: SECONDS[u], default="s")
        return f"newer than {seconds / SECONDS[unit]:g}{unit}"

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """Return those that are not older, including any from the future."""
        since = now - duration_seconds(self.duration)
        return _ids(c for c in candidates if c.time >= since)


@dataclass(frozen=True, init=False)
class AnyOf(RetentionPolicy):
    """Keep what any of several policies keeps; also written ``a | b``."""

    policies: tuple[RetentionPolicy, ...]

    def __init__(self, *policies: RetentionPolicy) -> None:
        if not policies:
            raise ValueError("AnyOf() needs at least one policy: without any it would delete every checkpoint")
        for policy in policies:
            check_policy(policy)
        object.__setattr__(self, "policies", tuple(part for policy in policies for part in policy.parts()))

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(repr, self.policies))})"

    def __str__(self) -> str:
        return ", ".join(map(str, self.policies))

    @property
    def metrics(self) -> frozenset[str]:
        """The metrics of all policies."""
        return frozenset().union(*(policy.metrics for policy in self.policies))

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """Return the union."""
        return set().union(*(policy.keep(candidates, now) for policy in self.policies))

    def parts(self) -> tuple[RetentionPolicy, ...]:
        """Return the policies, including those of a nested AnyOf."""
        return self.policies


class RetentionDecision(NamedTuple):
    """Decision on one checkpoint."""

    candidate: Candidate
    reasons: tuple[str, ...]
    """Policies and rules by which it stays; empty if it is to be deleted."""
    unknown: tuple[str, ...] = ()
    """The reasons about a metric that no checkpoint has."""


def evaluate(
    policy: RetentionPolicy, candidates: Sequence[Candidate], *, run_id: str, in_use: Collection[str], now: float
) -> list[RetentionDecision]:
    """Decide on each checkpoint, oldest first.

    Whatever the policy says, these stay: the newest that is not known to be damaged (and all, if every one is), those
    that a process reads, and those of other runs, which are not counted either. If no checkpoint has a metric that the
    policy
    needs, all stay: its name may be misspelt, or none was validated yet.

    Args:
        policy: the user's policy.
        candidates: complete checkpoints with a manifest, in any order.
        run_id: ID of the run whose checkpoints are decided on.
        in_use: storage IDs that processes read.
        now: current time in seconds since the epoch.
    """
    # Several runs may share a store, and each has its own policy.
    own = sorted((c for c in candidates if c.run_id == run_id), key=lambda c: c.age)
    kept = [(str(part), part.keep(own, now)) for part in policy.parts()]
    known = {name for c in own for name, value in c.metrics.items() if not math.isnan(value)}
    unknown = tuple(f"no checkpoint has the metric {name}" for name in sorted(policy.metrics - known))
    newest = next((c.storage_id for c in reversed(own) if not c.damaged), None)
    decisions = []
    for c in own:
        reasons = [*(reason for reason, ids in kept if c.storage_id in ids), *unknown]
        if newest is None:
            reasons.append("every checkpoint of the run is damaged")
        elif c.storage_id == newest:
            reasons.append("the newest that is intact")
        if c.storage_id in in_use:
            reasons.append("in use")
        decisions.append(RetentionDecision(c, tuple(reasons), unknown))
    others = sorted((c for c in candidates if c.run_id != run_id), key=lambda c: (c.run_id, c.age))
    return [RetentionDecision(c, ("of another run",)) for c in others] + decisions


def check_policy(policy: object) -> None:
    """Raise TypeError, with an example, if ``policy`` is not a retention policy."""
    if not isinstance(policy, RetentionPolicy):
        raise TypeError(f"retention={policy!r}: expected a policy such as core.KeepLatest(3) | core.KeepEvery(1000)")


def duration_seconds(duration: float | str | timedelta) -> float:
    """Return a duration in seconds.

    Raises:
        ValueError: If it is not a duration above 0.
    """
    seconds = -1.0
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str) and _DURATION.fullmatch(duration):
        seconds = sum(float(number) * SECONDS[unit] for number, unit in _DURATION_PART.findall(duration))
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = duration
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"{duration!r} is not a duration: expected seconds, a timedelta, or a text such as '90m', '12h', '7d', '2w'"
        )
    return seconds


def _check_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {value!r}: expected an integer of at least 1")


def _ids(candidates: Iterable[Candidate]) -> set[str]:
    return {c.storage_id for c in candidates}
