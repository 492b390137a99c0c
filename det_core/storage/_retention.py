"""Which checkpoints of a run stay: pure policies, and the guards that hold whatever a policy says."""

from __future__ import annotations

import abc
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
    """When it was committed, in seconds since the epoch."""
    restart: int = 0
    ordinal: int = 0
    """Counts the checkpoints of one restart."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of :attr:`RetentionPolicy.metrics` that are known of it."""
    run_id: str = ""
    damaged: bool = False
    """Whether it is known that files of it are missing or have another size."""

    @property
    def age(self) -> tuple[int, int, float, str]:
        """Sorts from the oldest to the newest of a run, by its restarts and not by its clock, which may jump."""
        return self.restart, self.ordinal, self.time, self.storage_id


class RetentionPolicy(abc.ABC):
    """Says which checkpoints of a run stay. ``a | b`` keeps what either keeps."""

    @property
    def metrics(self) -> frozenset[str]:
        """The validation metrics that it decides by; only they are looked up."""
        return frozenset()

    @abc.abstractmethod
    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """The storage_ids of those that stay.

        Args:
            candidates: all complete checkpoints of one run, in any order.
            now: the time, in seconds since the epoch.
        """

    def parts(self) -> tuple[RetentionPolicy, ...]:
        """The policies that this is a union of."""
        return (self,)

    def __or__(self, other: object) -> AnyOf:
        return AnyOf(self, other) if isinstance(other, RetentionPolicy) else NotImplemented


@dataclass(frozen=True)
class KeepLatest(RetentionPolicy):
    """Keeps the newest ``n``."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLatest(n)", self.n)

    def __str__(self) -> str:
        return "the latest" if self.n == 1 else f"the latest {self.n}"

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """The last to be committed."""
        return _ids(sorted(candidates, key=lambda c: c.age)[-self.n :])


@dataclass(frozen=True)
class KeepBest(RetentionPolicy):
    """Keeps the ``n`` with the best value of a metric; of equal ones the newer.

    A checkpoint's value is the validation metric reported for its ``steps_completed``, else a number of that name in
    its own metadata. One without a value, or with NaN, is never among the best.

    Args:
        n: how many.
        metric: its name; ``a.b`` for a metric ``b`` within ``a``.
        smaller_is_better: which end is best.
    """

    n: int
    metric: str
    smaller_is_better: bool = True

    def __post_init__(self) -> None:
        _check_count("KeepBest(n)", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"KeepBest(metric={self.metric!r}): give it the name of a validation metric")
        if not isinstance(self.smaller_is_better, bool):
            raise ValueError(f"KeepBest(smaller_is_better={self.smaller_is_better!r}): it must be True or False")

    def __str__(self) -> str:
        best = "the best" if self.n == 1 else f"the best {self.n}"
        return f"{best} by {'smallest' if self.smaller_is_better else 'largest'} {self.metric}"

    @property
    def metrics(self) -> frozenset[str]:
        """The one metric."""
        return frozenset([self.metric])

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """Those with the best values."""
        sign = -1 if self.smaller_is_better else 1
        having = [
            c for c in candidates if self.metric in c.metrics and c.metrics[self.metric] == c.metrics[self.metric]
        ]
        return _ids(sorted(having, key=lambda c: (sign * c.metrics[self.metric], c.age))[-self.n :])


@dataclass(frozen=True)
class KeepEvery(RetentionPolicy):
    """Keeps, of each ``steps`` steps, the first checkpoint at or after the multiple; and one of step 0.

    With ``KeepEvery(1000)`` and checkpoints of the steps 600, 1200, 1800, 2400 these are 1200 and 2400.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery(steps)", self.steps)

    def __str__(self) -> str:
        return f"every {self.steps} steps"

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """The first after each multiple; of those with equal steps the newest."""
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
    """Keeps those committed within a duration before now.

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
        """Those that are not older; one whose time is yet to come is not."""
        since = now - duration_seconds(self.duration)
        return _ids(c for c in candidates if c.time >= since)


@dataclass(frozen=True, init=False)
class AnyOf(RetentionPolicy):
    """Keeps what any of several policies keeps; also written ``a | b``."""

    policies: tuple[RetentionPolicy, ...]

    def __init__(self, *policies: RetentionPolicy) -> None:
        if not policies:
            raise ValueError("AnyOf() needs at least one policy: without any, nothing would stay")
        for policy in policies:
            check_policy(policy)
        object.__setattr__(self, "policies", tuple(part for policy in policies for part in policy.parts()))

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(repr, self.policies))})"

    def __str__(self) -> str:
        return ", ".join(map(str, self.policies))

    @property
    def metrics(self) -> frozenset[str]:
        """The metrics of all of them."""
        return frozenset().union(*(policy.metrics for policy in self.policies))

    def keep(self, candidates: Sequence[Candidate], now: float) -> set[str]:
        """The union."""
        return set().union(*(policy.keep(candidates, now) for policy in self.policies))

    def parts(self) -> tuple[RetentionPolicy, ...]:
        """The policies, those within another AnyOf too."""
        return self.policies


class RetentionDecision(NamedTuple):
    """What is to become of a checkpoint."""

    candidate: Candidate
    reasons: tuple[str, ...]
    """Why it stays: policies and guards; none: it goes."""
    unknown: tuple[str, ...] = ()
    """Those of the reasons that name a metric which no checkpoint has."""


def evaluate(
    policy: RetentionPolicy, candidates: Sequence[Candidate], *, run_id: str, in_use: Collection[str], now: float
) -> list[RetentionDecision]:
    """Decide on each checkpoint, oldest first.

    Whatever the policy says, these stay: the newest that is not known to be damaged (and all, if there is none), one
    that a process reads, and what is of another run. Those of other runs are not counted either. And as long as no
    checkpoint has a metric that the policy decides by, all stay: it may be misspelt, or none was validated yet.

    Args:
        policy: what the user wants.
        candidates: complete checkpoints, in any order. One without a manifest is no candidate.
        run_id: the run that they are to be of.
        in_use: the storage_ids that processes read.
        now: the time, in seconds since the epoch.
    """
    own = sorted((c for c in candidates if c.run_id == run_id), key=lambda c: c.age)
    kept = [(str(part), part.keep(own, now)) for part in policy.parts()]
    known = {name for c in own for name, value in c.metrics.items() if value == value}
    unknown = tuple(f"no checkpoint has the metric {name}" for name in sorted(policy.metrics - known))
    newest = next((c.storage_id for c in reversed(own) if not c.damaged), None)
    verdicts = []
    for c in own:
        reasons = [*(reason for reason, ids in kept if c.storage_id in ids), *unknown]
        if newest is None:
            reasons.append("no checkpoint of the run is whole")
        elif c.storage_id == newest:
            reasons.append("the newest that is whole")
        if c.storage_id in in_use:
            reasons.append("in use")
        verdicts.append(RetentionDecision(c, tuple(reasons), unknown))
    others = sorted((c for c in candidates if c.run_id != run_id), key=lambda c: (c.run_id, c.age))
    return [RetentionDecision(c, ("of another run",)) for c in others] + verdicts


def check_policy(policy: object) -> None:
    """Raise TypeError, with an example, if ``policy`` is none."""
    if not isinstance(policy, RetentionPolicy):
        raise TypeError(
            f"{policy!r} is no retention policy: give it for example core.KeepLatest(3) | core.KeepEvery(1000)"
        )


def duration_seconds(duration: float | str | timedelta) -> float:
    """A duration in seconds.

    Raises:
        ValueError: it is none, or not above 0.
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
            f"{duration!r} is no duration: give it seconds, a timedelta, or a text such as '90m', '12h', '7d' or '2w'"
        )
    return seconds


def _check_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {value!r}: it must be an integer of at least 1")


def _ids(candidates: Iterable[Candidate]) -> set[str]:
    return {c.storage_id for c in candidates}
