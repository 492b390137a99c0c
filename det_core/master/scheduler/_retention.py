"""Retention: checkpoints to delete when an experiment has ended (wire contract, section 11.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """A checkpoint of an experiment with files still in its storage."""

    uuid: str
    trial_id: int
    steps_completed: int
    ordinal: int
    """Number in the order in which they were reported."""
    metric: float | None = None
    """Searcher metric that its trial reported at these steps; None or NaN: none."""
    protected: bool = False
    """Whether something else needs it, such as a warm start of another experiment."""


def expired(
    checkpoints: Iterable[Kept],
    *,
    save_experiment_best: int,
    save_trial_best: int,
    save_trial_latest: int,
    smaller_is_better: bool,
) -> list[str]:
    """Return the UUIDs of the checkpoints to delete, in the order in which they were reported.

    One stays if it is among the best ``save_experiment_best`` of the experiment or the best ``save_trial_best`` of
    its trial, by a metric that it has; or among the latest ``save_trial_latest`` of its trial, by steps. Of
    equal ones of a trial the newer is better, of equal trials the earlier. One that is protected stays too, and is
    counted among them.
    """
    everything = sorted(checkpoints, key=lambda c: c.ordinal)
    stay = {c.uuid for c in everything if c.protected}
    stay |= _best(everything, save_experiment_best, smaller_is_better)
    for trial in _by_trial(everything):
        stay |= _best(trial, save_trial_best, smaller_is_better)
        latest = sorted(trial, key=lambda c: (-c.steps_completed, -c.ordinal))
        stay |= {c.uuid for c in latest[:save_trial_latest]}
    return [c.uuid for c in everything if c.uuid not in stay]


def _by_trial(checkpoints: Sequence[Kept]) -> list[list[Kept]]:
    trials: dict[int, list[Kept]] = {}
    for c in checkpoints:
        trials.setdefault(c.trial_id, []).append(c)
    return list(trials.values())


def _best(checkpoints: Sequence[Kept], count: int, smaller_is_better: bool) -> set[str]:
    sign = 1 if smaller_is_better else -1
    known = [(sign * c.metric, c.trial_id, -c.ordinal, c.uuid) for c in checkpoints if c.metric is not None]
    return {k[-1] for k in sorted(k for k in known if not math.isnan(k[0]))[:count]}
