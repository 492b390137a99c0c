"""Placement: which allocations start, by age within a priority, and which of lower priorities stop for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PRIORITY = 42
"""Priority of experiments without one; 1 is served first, 99 last."""


@dataclass(frozen=True)
class Pool:
    """Where allocations run."""

    slots: int
    """Number of slots, whose IDs count from 0; with :attr:`queues`, number of allocations in flight."""
    queues: bool = False
    """Whether a cluster gives out its slots itself, to allocations that queue there."""
    slots_per_node: int | None = None
    """Number of slots that one node has; None: all are on one node."""

    @property
    def slot_ids(self) -> range:
        """IDs of the slots; none where the cluster gives them out."""
        if self.queues:
            return range(0)
        return range(self.slots)

    def count_nodes(self, slots: int) -> int:
        """Return how many nodes an allocation of that many slots runs on."""
        if self.slots_per_node is None:
            return 1
        return max(-(-slots // self.slots_per_node), 1)


@dataclass(frozen=True)
class _Allocation:
    allocation_id: str
    experiment_id: int
    trial_id: int
    slots: int
    """Number of slots; 0: none, so that it never waits."""
    priority: int = DEFAULT_PRIORITY

    @property
    def turn(self) -> tuple[int, int, int]:
        """Sort key: by priority, then by age, so that a trial that was preempted keeps its place."""
        return self.priority, self.experiment_id, self.trial_id


@dataclass(frozen=True)
class PendingAllocation(_Allocation):
    """An allocation that waits for slots."""

    max_slots: int | None = None
    """Slots that its experiment may use at a time."""


@dataclass(frozen=True)
class RunningAllocation(_Allocation):
    """An allocation that holds slots."""

    slot_ids: tuple[int, ...] = ()
    """IDs of its slots, where the pool has them."""
    ending: bool = False
    """Whether it was asked to stop, so that its slots will be free soon."""
    queued: bool = False
    """Whether it queues in the cluster, so that nothing is lost when it is stopped."""


@dataclass(frozen=True)
class Placement:
    """An allocation to start, with its slots."""

    pending: PendingAllocation
    slot_ids: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """Allocations to start and to stop now."""

    start: tuple[Placement, ...] = ()
    preempt: tuple[RunningAllocation, ...] = ()
    """Allocations to stop, so that one of a higher priority can start when they have ended."""


def decide(running: Sequence[RunningAllocation], pending: Sequence[PendingAllocation], pool: Pool) -> Decision:
    """Decide which allocations start and which stop; equal arguments, in any order, give equal decisions.

    Allocations are served by priority, and within one the older experiment and its older trial first. The first that
    does not fit keeps the free slots and everything behind it waits, so that an allocation of many slots does not
    starve. Outside the queue are those without slots, those limited by their own experiment, and those that want more
    than there is. For one that does not fit, allocations of lower priorities stop, the lowest and latest first, and no
    more than it needs; if all of them would not suffice, none.

    In a pool that queues, each allocation takes one place, whatever its slots, and those that still queue in the
    cluster stop before those that run.

    Args:
        running: All allocations that hold slots, also those about to end.
        pending: All that wait.
        pool: Where they run.
    """
    return _Round(running, pool).serve(sorted(pending, key=lambda allocation: allocation.turn))


class _Round:
    """One decision in the making."""

    def __init__(self, running: Sequence[RunningAllocation], pool: Pool) -> None:
        self._pool = pool
        self._free_ids = sorted(set(pool.slot_ids) - {slot for allocation in running for slot in allocation.slot_ids})
        self._free = max(pool.slots - len(running), 0) if pool.queues else len(self._free_ids)
        """Places: slots, or allocations in flight."""
        self._coming = sum(self._yield_of(allocation) for allocation in running if allocation.ending)
        """Places that come free and are not promised yet."""
        candidates = [allocation for allocation in running if not allocation.ending]
        self._victims = sorted(candidates, key=lambda victim: (victim.queued, victim.turn), reverse=True)
        self._used: Counter[int] = Counter()
        for allocation in running:
            self._used[allocation.experiment_id] += allocation.slots
        self._start: list[Placement] = []
        self._preempt: list[RunningAllocation] = []

    def serve(self, queue: Sequence[PendingAllocation]) -> Decision:
        """Return the decision on allocations in the order of their turns."""
        is_open = True
        for allocation in queue:
            need = self._need_of(allocation)
            exceeds = allocation.max_slots is not None and allocation.slots > allocation.max_slots
            if need == 0:
                self._start.append(Placement(allocation, ()))
            elif exceeds or need > self._pool.slots:
                continue  # it can never run, and must not hold up those that can
            elif is_open and self._is_within_limit(allocation):
                is_open = self._place(allocation)
        return Decision(tuple(self._start), tuple(self._preempt))

    def _is_within_limit(self, allocation: PendingAllocation) -> bool:
        if allocation.max_slots is None:
            return True
        return self._used[allocation.experiment_id] + allocation.slots <= allocation.max_slots

    def _place(self, allocation: PendingAllocation) -> bool:
        """Start an allocation, or keep slots for it; return False if it needs more than can be had."""
        need = self._need_of(allocation)
        missing = need - self._free
        if missing > 0:
            victims = self._choose_victims(allocation, missing - self._coming)
            if victims is None:
                return False
            self._preempt += victims
            self._victims = [victim for victim in self._victims if victim not in victims]
            self._coming += sum(map(self._yield_of, victims)) - missing
            self._free = 0
        else:
            slot_ids = () if self._pool.queues else tuple(self._free_ids[:need])
            self._start.append(Placement(allocation, slot_ids))
            self._free_ids = self._free_ids[len(slot_ids) :]
            self._free -= need
        self._used[allocation.experiment_id] += allocation.slots
        return True

    def _choose_victims(self, allocation: PendingAllocation, missing: int) -> list[RunningAllocation] | None:
        """Return victims that free ``missing`` places for an allocation, or None if there are not enough."""
        chosen: list[RunningAllocation] = []
        for victim in self._victims:
            if missing <= 0:
                break
            if victim.priority > allocation.priority and self._yield_of(victim):
                chosen.append(victim)
                missing -= self._yield_of(victim)
        if missing > 0:
            return None
        # Slots come in lots: a later victim may have made an earlier one unnecessary. Spare the first in turn first.
        for victim in reversed(chosen[:]):
            if self._yield_of(victim) <= -missing:
                chosen.remove(victim)
                missing += self._yield_of(victim)
        return chosen

    def _need_of(self, allocation: PendingAllocation) -> int:
        """Return how many places an allocation takes."""
        if self._pool.queues:
            return 1
        return allocation.slots

    def _yield_of(self, allocation: RunningAllocation) -> int:
        """Return how many places come free when an allocation ends; a slot may be gone since it started."""
        if self._pool.queues:
            return 1
        return sum(slot in self._pool.slot_ids for slot in allocation.slot_ids)
