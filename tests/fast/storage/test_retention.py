"""Retention policies: what each keeps, and what no policy may take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.storage import (
    AnyOf,
    Candidate,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepWithin,
    RetentionPolicy,
    check_policy,
    evaluate,
)

RUN = "run"
NOW = 1_000_000.0
values = st.floats() | st.integers(-3, 3).map(float)  # so that equal ones are frequent
policies = st.deferred(
    lambda: (
        st.builds(KeepLatest, st.integers(1, 5))
        | st.builds(KeepBest, st.integers(1, 4), st.sampled_from(["loss", "acc"]), st.booleans())
        | st.builds(KeepEvery, st.integers(1, 300))
        | st.builds(KeepWithin, st.floats(1, 2e6))
        | st.lists(policies, min_size=1, max_size=3).map(lambda several: AnyOf(*several))
    )
)


def candidate(
    number: int, *, steps: int | None = None, restart: int = 0, age: float = 0.0, **more: object
) -> Candidate:
    """Return the ``number``-th checkpoint of the run."""
    made = Candidate(f"c{number}", 10 * number if steps is None else steps, NOW - age, restart, number, run_id=RUN)
    return dataclasses.replace(made, **more)


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Draw checkpoints of one run and a few of another, in no order."""
    found = []
    for number in range(draw(st.integers(0, 12))):
        made = candidate(
            number,
            steps=draw(st.integers(0, 500)),
            restart=draw(st.integers(0, 3)),
            age=draw(st.floats(-1e6, 1e6)),
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "acc"]), values)),
            run_id=draw(st.sampled_from([RUN, RUN, RUN, "another"])),
            damaged=draw(st.sampled_from([False, False, True])),
        )
        found.append(made)
    return draw(st.permutations(found))


def own(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates of the run, oldest first."""
    return sorted((c for c in candidates if c.run_id == RUN), key=lambda c: c.age)


@given(policies, histories(), st.sets(st.sampled_from([f"c{i}" for i in range(12)])))
def test_evaluate_with_any_policy_keeps_protected_checkpoints(
    policy: RetentionPolicy, candidates: list[Candidate], in_use: set[str]
) -> None:
    going = _going(policy, candidates, run_id=RUN, in_use=in_use, now=NOW)
    ours = own(candidates)
    whole = [c.storage_id for c in ours if not c.damaged]
    assert not in_use & set(going)
    assert set(going) <= {c.storage_id for c in ours}, "another run's checkpoint is never deleted"
    assert not going or whole[-1] not in going, "the newest that is intact stays"
    assert whole or going == [], "where none is whole, all stay"
    assert not set(going) & policy.keep(ours, NOW), "what the policy keeps stays"
    assert [c.storage_id for c in ours if c.storage_id in going] == going, "the oldest goes first"


@given(policies, histories(), st.sets(st.sampled_from([f"c{i}" for i in range(12)])))
def test_evaluate_of_kept_checkpoints_keeps_them(
    policy: RetentionPolicy, candidates: list[Candidate], in_use: set[str]
) -> None:
    """Deleting all or only some of what is to go, as a delete may fail, changes nothing for the rest."""
    going = _going(policy, candidates, run_id=RUN, in_use=in_use, now=NOW)
    for done in range(len(going) + 1):
        left = [c for c in candidates if c.storage_id not in going[:done]]
        assert _going(policy, left, run_id=RUN, in_use=in_use, now=NOW) == going[done:]


@given(policies, policies, histories())
def test_union_keeps_what_either_keeps(a: RetentionPolicy, b: RetentionPolicy, candidates: list[Candidate]) -> None:
    both = (a | b).keep(candidates, NOW)
    assert both == a.keep(candidates, NOW) | b.keep(candidates, NOW)
    assert both == (b | a).keep(candidates, NOW)
    assert (a | b).metrics == a.metrics | b.metrics


@given(policies, histories())
def test_every_kept_checkpoint_has_a_reason(policy: RetentionPolicy, candidates: list[Candidate]) -> None:
    verdicts = evaluate(policy, candidates, run_id=RUN, in_use=set(), now=NOW)
    assert {v.candidate.storage_id for v in verdicts} == {c.storage_id for c in candidates}
    going = _going(policy, candidates, run_id=RUN, in_use=set(), now=NOW)
    assert [v.candidate.storage_id for v in verdicts if not v.reasons] == going
    kept = policy.keep(own(candidates), NOW)
    named = {str(part) for part in policy.parts()}
    for verdict in verdicts:
        by_policy = named.intersection(verdict.reasons)
        assert bool(by_policy) == (verdict.candidate.storage_id in kept)


@given(st.integers(1, 20), histories())
def test_keep_latest_keeps_newest_n(n: int, candidates: list[Candidate]) -> None:
    ours = own(candidates)
    assert KeepLatest(n).keep(ours, NOW) == {c.storage_id for c in ours[-n:]}


def test_keep_latest_orders_by_restart_before_time() -> None:
    before = [candidate(n, steps=100 + n) for n in range(3)]
    after = [candidate(n, steps=n, restart=1) for n in range(3, 5)]
    assert KeepLatest(3).keep(before + after, NOW) == {"c2", "c3", "c4"}


@given(st.integers(1, 5), st.booleans(), histories())
def test_keep_best_keeps_best_n(n: int, smaller: bool, candidates: list[Candidate]) -> None:
    kept = KeepBest(n, "loss", smaller_is_better=smaller).keep(candidates, NOW)
    rated = {c.storage_id: c.metrics["loss"] for c in candidates if "loss" in c.metrics}
    numbers = {name: value for name, value in rated.items() if not math.isnan(value)}
    assert len(kept) == min(n, len(numbers))
    assert kept <= set(numbers), "without a value, or with NaN, none is best"
    worse = [value for name, value in numbers.items() if name not in kept]
    better = [numbers[name] for name in kept]
    assert not worse or all(b <= w if smaller else b >= w for b in better for w in worse)


def test_keep_best_of_equal_values_keeps_the_newer() -> None:
    equal = [candidate(n, metrics={"loss": 0.5}) for n in range(4)]
    for smaller in (True, False):
        assert KeepBest(2, "loss", smaller_is_better=smaller).keep(equal, NOW) == {"c2", "c3"}


def test_keep_every_keeps_first_at_or_after_each_multiple() -> None:
    candidates = [candidate(n, steps=steps) for n, steps in enumerate([0, 600, 1200, 1800, 2400, 2999, 5000])]
    assert KeepEvery(1000).keep(candidates, NOW) == {"c0", "c2", "c4", "c6"}
    again = [*candidates, candidate(7, steps=1200, restart=1), candidate(8, steps=1300, restart=1)]
    assert KeepEvery(1000).keep(again, NOW) == {"c0", "c7", "c4", "c6"}, "of equal steps the newer one"


@given(st.integers(1, 300), histories())
def test_keep_every_keeps_one_per_multiple(steps: int, candidates: list[Candidate]) -> None:
    kept = {c.steps_completed for c in candidates if c.storage_id in KeepEvery(steps).keep(candidates, NOW)}
    assert {c.steps_completed for c in candidates if c.steps_completed % steps == 0} <= kept
    assert len({step // steps for step in kept}) == len(kept), "one of each multiple"


def test_keep_within_keeps_newer_than_duration() -> None:
    candidates = [candidate(n, age=hours * 3600) for n, hours in enumerate([200, 168, 24, 1, -5])]
    for week in ("7d", "1w", "168h", "6d 24h", 7 * 86400, timedelta(days=7)):
        assert KeepWithin(week).keep(candidates, NOW) == {"c1", "c2", "c3", "c4"}
    assert KeepWithin("0.5h").keep(candidates, NOW) == {"c4"}, "a time that is yet to come is new"


def test_clock_jump_deletes_no_protected_checkpoint() -> None:
    candidates = [candidate(n, age=age) for n, age in enumerate([0.0, -5e5, 9e8])]
    assert _going(KeepWithin("1h"), candidates, run_id=RUN, in_use=(), now=NOW + 1e9) == ["c0", "c1"]
    assert _going(KeepLatest(1), candidates, run_id=RUN, in_use=(), now=0.0) == ["c0", "c1"]


def test_damaged_newest_protects_the_previous() -> None:
    candidates = [candidate(0), candidate(1), candidate(2, damaged=True)]
    assert _going(KeepLatest(1), candidates, run_id=RUN, in_use=(), now=NOW) == ["c0"]
    broken = [dataclasses.replace(c, damaged=True) for c in candidates]
    assert _going(KeepLatest(1), broken, run_id=RUN, in_use=(), now=NOW) == []


def test_unknown_metric_deletes_nothing() -> None:
    candidates = [candidate(n, metrics={"val_loss": float(n)}) for n in range(3)]
    assert _going(KeepBest(1, "val_loss"), candidates, run_id=RUN, in_use=(), now=NOW) == ["c1"]
    misspelt = KeepBest(1, "loss") | KeepLatest(1)
    assert _going(misspelt, candidates, run_id=RUN, in_use=(), now=NOW) == []
    nan = [candidate(n, metrics={"loss": math.nan}) for n in range(3)]
    assert _going(misspelt, nan, run_id=RUN, in_use=(), now=NOW) == []
    verdicts = evaluate(misspelt, candidates, run_id=RUN, in_use=(), now=NOW)
    assert {v.reasons[-1] for v in verdicts[:2]} == {"no checkpoint has the metric loss"}


def test_policy_text_describes_what_it_keeps() -> None:
    policy = KeepLatest(3) | KeepBest(1, "loss") | KeepBest(2, "acc", smaller_is_better=False) | KeepEvery(50)
    told = "the latest 3, the best by smallest loss, the best 2 by largest acc, every 50 steps"
    assert str(policy) == told
    assert [str(part) for part in policy.parts()] == told.split(", ")
    assert policy == AnyOf(*policy.parts())
    assert repr(KeepLatest(1) | KeepEvery(5)) == "AnyOf(KeepLatest(n=1), KeepEvery(steps=5))"
    newer = {"7d": "7d", 5400.0: "1.5h", timedelta(weeks=2): "2w", 0.5: "0.5s", 1e300: f"{1e300 / 604800:g}w"}
    assert {d: str(KeepWithin(d)) for d in newer} == {d: f"newer than {text}" for d, text in newer.items()}


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3", None])
def test_invalid_count_is_rejected(bad: object) -> None:
    for make in (KeepLatest, KeepEvery, lambda n: KeepBest(n, "loss")):
        with pytest.raises(ValueError, match="expected an integer of at least 1"):
            make(bad)


@pytest.mark.parametrize(
    "bad", ["", "7", "d", "7 days", "-1d", "1d-", 0, -5, math.nan, math.inf, True, timedelta(0), None]
)
def test_invalid_duration_is_rejected(bad: object) -> None:
    with pytest.raises(ValueError, match="is not a duration: expected seconds, a timedelta, or a text such as"):
        KeepWithin(bad)


def test_invalid_policy_is_rejected_with_an_example() -> None:
    with pytest.raises(ValueError, match="at least one policy"):
        AnyOf()
    for bad in (3, "latest", None, KeepLatest):
        with pytest.raises(TypeError, match=r"expected a policy such as core\.KeepLatest\(3\)"):
            check_policy(bad)
        with pytest.raises(TypeError):
            KeepLatest(1) | bad
    with pytest.raises(ValueError, match="name of a validation metric"):
        KeepBest(1, "")
    with pytest.raises(ValueError, match="True or False"):
        KeepBest(1, "loss", "yes")


def test_user_defined_policy_is_evaluated() -> None:
    class KeepEven(RetentionPolicy):
        def keep(self, candidates: object, now: float) -> set[str]:
            return {c.storage_id for c in candidates if c.steps_completed % 20 == 0}

        def __str__(self) -> str:
            return "even ones"

    verdicts = evaluate(KeepEven() | KeepLatest(1), [candidate(n) for n in range(5)], run_id=RUN, in_use=(), now=NOW)
    assert [v.reasons for v in verdicts] == [
        ("even ones",), (), ("even ones",), (), ("even ones", "the latest", "the newest that is intact"),
    ]  # fmt: skip


def _going(
    policy: RetentionPolicy, candidates: Sequence[Candidate], *, run_id: str, in_use: Collection[str], now: float
) -> list[str]:
    """Return the storage IDs that are deleted, oldest first."""
    verdicts = evaluate(policy, candidates, run_id=run_id, in_use=in_use, now=now)
    return [verdict.candidate.storage_id for verdict in verdicts if not verdict.reasons]
