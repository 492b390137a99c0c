"""Placement: FIFO within a priority, preemption where it helps, and no starvation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.master.scheduler import Decision, PendingAllocation, Placement, Pool, RunningAllocation, decide


def wants(
    number: int, slots: int = 1, *, priority: int = 42, experiment: int = 1, most: int | None = None
) -> PendingAllocation:
    """Return the ``number``-th allocation to want slots."""
    return PendingAllocation(f"{experiment}.r{number}.1", experiment, number, slots, priority, most)


def runs(number: int, *slots: int, priority: int = 42, experiment: int = 1, ending: bool = False) -> RunningAllocation:
    """Return the ``number``-th allocation, which runs on ``slots``."""
    return RunningAllocation(f"{experiment}.r{number}.1", experiment, number, len(slots), priority, slots, ending)


def started(decision: Decision) -> dict[int, tuple[int, ...]]:
    return {s.pending.trial_id: s.slot_ids for s in decision.start}


def stopped(decision: Decision) -> set[int]:
    return {r.trial_id for r in decision.preempt}


def in_flight(number: int, slots: int, *, priority: int = 42, queued: bool = False) -> RunningAllocation:
    """Return an allocation in a pool that queues."""
    return RunningAllocation(f"1.r{number}.1", 1, number, slots, priority, queued=queued)


QUEUE = Pool(2, queues=True)
LIMITED = [wants(2, most=2, experiment=1), wants(3, most=2, experiment=1), wants(4, experiment=2)]


@pytest.mark.parametrize(
    ("running", "pending", "pool", "slots"),
    [
        pytest.param([], [wants(3), wants(1), wants(2)], Pool(2), {1: (0,), 2: (1,)}, id="in turn, lowest slots first"),
        pytest.param([runs(1, 0)], [wants(2, 2)], Pool(3), {2: (1, 2)}, id="slots that are free"),
        pytest.param([], [wants(1), wants(2, priority=1)], Pool(1), {2: (0,)}, id="higher priority first"),
        pytest.param(
            [runs(1, 0)], [wants(2, 2), wants(3), wants(4, priority=99)], Pool(2), {}, id="nobody passes who waits"
        ),
        pytest.param([runs(1, 0)], [wants(2), wants(3, 0)], Pool(1), {3: ()}, id="without slots"),
        pytest.param([], [wants(3, 0)], Pool(0), {3: ()}, id="no slots at all"),
        pytest.param([], [wants(1, 3), wants(2, 2, most=1), wants(3, 2)], Pool(2), {3: (0, 1)}, id="can never run"),
        pytest.param([runs(1, 0)], LIMITED, Pool(4), {2: (1,), 4: (2,)}, id="limit of an experiment"),
        pytest.param([], [wants(1, 64), wants(2, 8), wants(3)], QUEUE, {1: (), 2: ()}, id="queue, any size"),
        pytest.param([in_flight(1, 64)], [wants(2, 0), wants(3)], QUEUE, {2: ()}, id="queue, a number"),
        pytest.param(
            [in_flight(1, 8)],
            [wants(2, 8, most=16), wants(3, 8, most=16), wants(4, 32, most=16)],
            Pool(10, queues=True),
            {2: ()},
            id="queue, limit of an experiment",
        ),
    ],
)
def test_decide_starts(
    running: list[RunningAllocation], pending: list[PendingAllocation], pool: Pool, slots: dict[int, tuple[int, ...]]
) -> None:
    decision = decide(running, pending, pool)
    assert started(decision) == slots
    assert not decision.preempt


FOUR = [runs(1, 0, priority=50), runs(2, 1, priority=60), runs(3, 2, priority=60), runs(4, 3, priority=42)]
WIDE = [runs(1, 0, 1, 2, priority=50), runs(2, 3, priority=60)]
ENDING = [runs(1, 0, ending=True), runs(2, 1, priority=99)]
IN_FLIGHT = [in_flight(1, 8, priority=60, queued=True), in_flight(2, 1, priority=99), in_flight(3, 1, priority=60)]


@pytest.mark.parametrize(
    ("running", "pending", "pool", "numbers"),
    [
        pytest.param(FOUR, [wants(5)], Pool(4), {3}, id="lowest and latest first"),
        pytest.param(FOUR, [wants(5, 3)], Pool(4), {1, 2, 3}, id="as many as are needed"),
        pytest.param(FOUR, [wants(5, 4)], Pool(4), set(), id="none of the same priority"),
        pytest.param(WIDE, [wants(3, 3)], Pool(4), {1}, id="no more than needed"),
        pytest.param([runs(1, 0, priority=99)], [wants(2)], Pool(2), set(), id="a slot is free"),
        pytest.param(ENDING, [wants(3, priority=1)], Pool(2), set(), id="a slot comes free anyway"),
        pytest.param(ENDING, [wants(3, priority=1), wants(4, priority=1)], Pool(2), {2}, id="one comes free, two wait"),
        pytest.param(
            [runs(n, n, priority=99) for n in range(4)],
            [wants(8, priority=1), wants(9, priority=1)],
            Pool(4),
            {2, 3},
            id="a victim each",
        ),
        pytest.param([runs(1, 7, priority=99), runs(2, 0, priority=98)], [wants(3)], Pool(1), {2}, id="slot is gone"),
        pytest.param(IN_FLIGHT, [wants(4, 4)], Pool(3, queues=True), {1}, id="queued in the cluster first"),
        pytest.param(IN_FLIGHT, [wants(4), wants(5)], Pool(3, queues=True), {1, 2}, id="then by priority"),
    ],
)
def test_decide_preempts(
    running: list[RunningAllocation], pending: list[PendingAllocation], pool: Pool, numbers: set[int]
) -> None:
    assert stopped(decide(running, pending, pool)) == numbers


def test_what_is_kept_for_a_higher_priority_is_not_given_to_the_next() -> None:
    decision = decide([runs(1, 0, priority=99)], [wants(2, 2, priority=1), wants(3, priority=50)], Pool(2))
    assert (stopped(decision), started(decision)) == ({1}, {})


def test_nodes_of_an_allocation_follow_the_slots_that_one_has() -> None:
    assert [Pool(9, slots_per_node=4).count_nodes(slots) for slots in (0, 1, 4, 5, 9)] == [1, 1, 1, 2, 3]
    assert Pool(9).count_nodes(9) == 1


Situation = tuple[list[RunningAllocation], list[PendingAllocation], Pool]
priorities = st.sampled_from([1, 42, 42, 42, 99])


def can_run(allocation: PendingAllocation, pool: Pool) -> bool:
    limit = allocation.slots if allocation.max_slots is None else allocation.max_slots
    return allocation.slots <= limit and (pool.queues or allocation.slots <= pool.slots)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Draw a situation in which some run on disjoint slots and some wait."""
    pool = Pool(draw(st.integers(0, 6)))
    free = draw(st.permutations(pool.slot_ids))
    running, number = [], itertools.count()
    while free and draw(st.booleans()):
        take = draw(st.integers(1, len(free)))
        ids, free = tuple(sorted(free[:take])), free[take:]
        more = {"priority": draw(priorities), "experiment": draw(st.integers(1, 3)), "ending": draw(st.booleans())}
        running.append(runs(next(number), *ids, **more))
    most = {e: draw(st.none() | st.integers(1, 6)) for e in (1, 2, 3)}
    pending = [
        wants(next(number), draw(st.integers(0, 7)), priority=draw(priorities), experiment=e, most=most[e])
        for e in draw(st.lists(st.integers(1, 3), max_size=8))
    ]
    return running, pending, pool


@given(situations(), st.randoms())
def test_no_slot_is_given_twice_and_each_gets_what_it_wants(situation: Situation, random: object) -> None:
    running, pending, pool = situation
    decision = decide(running, pending, pool)
    given_out = [slot for s in decision.start for slot in s.slot_ids] + [slot for r in running for slot in r.slot_ids]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(pool.slot_ids)
    assert all(len(s.slot_ids) == s.pending.slots for s in decision.start)
    assert len({s.pending.allocation_id for s in decision.start}) == len(decision.start)
    random.shuffle(running), random.shuffle(pending)  # type: ignore[attr-defined]
    assert decide(running, pending, pool) == decision


@given(situations())
def test_whoever_is_passed_cannot_run(situation: Situation) -> None:
    running, pending, pool = situation
    decision = decide(running, pending, pool)
    begun = {s.pending.allocation_id for s in decision.start}
    used = {e: sum(len(r.slot_ids) for r in running if r.experiment_id == e) for e in (1, 2, 3)}
    for s in decision.start:
        for w in pending:
            waits_before = w.turn < s.pending.turn and w.allocation_id not in begun and can_run(w, pool)
            if waits_before and s.pending.slots > 0:  # then only the limit of its experiment holds it back
                later = sum(o.pending.slots for o in decision.start if o.pending.experiment_id == w.experiment_id)
                assert w.max_slots is not None and used[w.experiment_id] + later + w.slots > w.max_slots


@given(situations())
def test_a_preemption_lets_one_of_a_higher_priority_start(
    situation: Situation,
) -> None:
    running, pending, pool = situation
    decision = decide(running, pending, pool)
    assert not [r for r in decision.preempt if r.ending]
    if not decision.preempt:
        return
    still = [w for w in pending if w.allocation_id not in {s.pending.allocation_id for s in decision.start}]
    begun = [_running(s) for s in decision.start]
    gone = {r.allocation_id for r in (*decision.preempt, *(r for r in running if r.ending))}
    after = decide([r for r in running if r.allocation_id not in gone] + begun, still, pool)
    starts = [s.pending for s in after.start if s.pending.slots]
    assert starts
    assert all(min(w.priority for w in starts) < r.priority for r in decision.preempt)
    for spared in decision.preempt:  # without any one of them, fewer could start
        fewer = gone - {spared.allocation_id}
        without = decide([r for r in running if r.allocation_id not in fewer] + begun, still, pool)
        assert sum(s.pending.slots for s in without.start) < sum(w.slots for w in starts)


def _running(start: Placement) -> RunningAllocation:
    w = start.pending
    return RunningAllocation(w.allocation_id, w.experiment_id, w.trial_id, w.slots, w.priority, start.slot_ids)


@given(situations(), st.data())
def test_in_the_end_everybody_has_run_and_equals_in_their_order(situation: Situation, data: st.DataObject) -> None:
    running, pending, pool = situation
    left = [w for w in pending if can_run(w, pool)]
    begun: list[PendingAllocation] = []
    for _ in range(4 * (len(running) + len(left)) + 4):
        decision = decide(running, left, pool)
        begun += [s.pending for s in decision.start]
        left = [w for w in left if w not in begun]
        stops = {r.allocation_id for r in decision.preempt}
        running = [r for r in running if r.allocation_id not in stops] + [_running(s) for s in decision.start]
        if running:  # somebody ends
            running.remove(data.draw(st.sampled_from(running)))
        if not left:
            break
    assert left == []
    assert _turns(begun) == sorted(_turns(begun))


def _turns(begun: Sequence[PendingAllocation]) -> list[tuple[int, int, int]]:
    """Return the turns of those of the default priority that only their turn holds back."""
    return [w.turn for w in begun if w.priority == 42 and w.slots and w.max_slots is None]
