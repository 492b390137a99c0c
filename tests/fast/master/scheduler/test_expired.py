"""Which checkpoints go when an experiment has ended."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from det_core.master.scheduler import Kept, expired

LOSSES = {1: [0.9, 0.2, 0.5], 2: [0.8, 0.1, None], 3: [None, 0.3, 0.4]}


def checkpoints() -> list[Kept]:
    """Return three trials with three checkpoints each, named ``t<trial>s<step>``, reported in turn."""
    return [
        Kept(f"t{trial}s{step}", trial, step, 10 * step + trial, losses[step])
        for step in range(3)
        for trial, losses in LOSSES.items()
    ]


def stay(found: list[Kept], best: int, trial_best: int, latest: int, *, smaller: bool = True) -> set[str]:
    gone = expired(
        found,
        save_experiment_best=best,
        save_trial_best=trial_best,
        save_trial_latest=latest,
        smaller_is_better=smaller,
    )
    assert len(gone) == len(set(gone))
    return {c.uuid for c in found} - set(gone)


def test_each_number_keeps_its_own() -> None:
    assert stay(checkpoints(), 0, 0, 0) == set()
    assert stay(checkpoints(), 2, 0, 0) == {"t2s1", "t1s1"}
    assert stay(checkpoints(), 2, 0, 0, smaller=False) == {"t1s0", "t2s0"}
    assert stay(checkpoints(), 0, 1, 0) == {"t1s1", "t2s1", "t3s1"}
    assert stay(checkpoints(), 0, 3, 0) == {c.uuid for c in checkpoints() if c.metric is not None}
    assert stay(checkpoints(), 0, 0, 1) == {"t1s2", "t2s2", "t3s2"}
    assert stay(checkpoints(), 1, 0, 1) == {"t2s1", "t1s2", "t2s2", "t3s2"}


def test_the_defaults_keep_each_trials_best_and_latest() -> None:
    assert stay(checkpoints(), 0, 1, 1) == {"t1s1", "t2s1", "t3s1", "t1s2", "t2s2", "t3s2"}


kept = st.lists(
    st.builds(
        Kept,
        uuid=st.uuids().map(str),
        trial_id=st.integers(1, 3),
        steps_completed=st.integers(0, 5),
        ordinal=st.integers(0, 1000),
        metric=st.none() | st.floats() | st.sampled_from([0.0, 1.0]),
        protected=st.booleans(),
    ),
    unique_by=(lambda c: c.uuid, lambda c: c.ordinal),
    max_size=12,
)
counts = st.integers(0, 4)


@given(kept, counts, counts, counts, st.booleans())
def test_the_rule_of_the_contract(found: list[Kept], best: int, trial_best: int, latest: int, smaller: bool) -> None:
    """One goes iff its ranks, counted one by one, are too high: the rule as it is written, and not as it is coded."""

    def better(a: Kept, b: Kept) -> bool:
        if a.metric == b.metric:
            return (a.trial_id, -a.ordinal) < (b.trial_id, -b.ordinal)
        return a.metric < b.metric if smaller else a.metric > b.metric  # type: ignore[operator]

    def goes(c: Kept) -> bool:
        own = [o for o in found if o.trial_id == c.trial_id]
        order = sum((o.steps_completed, o.ordinal) >= (c.steps_completed, c.ordinal) for o in own)
        if c.protected or order <= latest:
            return False
        if c.metric is None or math.isnan(c.metric):
            return True
        known = [o for o in found if o.metric is not None and not math.isnan(o.metric)]
        rank = 1 + sum(better(o, c) for o in known)
        trial_rank = 1 + sum(better(o, c) for o in known if o.trial_id == c.trial_id)
        return rank > best and trial_rank > trial_best

    gone = {c.uuid for c in found} - stay(found, best, trial_best, latest, smaller=smaller)
    assert gone == {c.uuid for c in found if goes(c)}
