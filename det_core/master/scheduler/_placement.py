"""Placement: which allocations get slots, by age within a priority, and which lower priorities stop for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PRIORITY = 42
"""Priority of experiments without one; 1 is served first, 99 last."""


@dataclass(frozen=True)
class PendingAllocation:
    """An allocation that waits for slots."""

    allocation_id: str
    experiment_id: int
    trial_id: int
    slots: int
    """Number of slots; 0: none, so that it never waits."""
    priority: int = DEFAULT_PRIORITY
    max_slots: int | None = None
    """Slots that its experiment may use at a time."""

    @property
    def turn(self) -> tuple[int, int, int]:
        """Sort key: by priority, then by age, so that a trial that was preempted keeps its place."""
        return self.priority, self.experiment_id, self.trial_id


@dataclass(frozen=True)
class RunningAllocation:
    """An allocation that holds slots."""

    allocation_id: str
    experiment_id: int
    trial_id: int
    slot_ids: tuple[int, ...]
    priority: int = DEFAULT_PRIORITY
    ending: bool = False
    """Whether it was told to stop, so that its slots will be free soon."""

    @property
    def turn(self) -> tuple[int, int, int]:
        """Sort key, as if it were pending."""
        return self.priority, self.experiment_id, self.trial_id


@dataclass(frozen=True)
class Placement:
    """An allocation to start, with its slots."""

    pending: PendingAllocation
    slot_ids: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    start: tuple[Placement, ...] = ()
    preempt: tuple[RunningAllocation, ...] = ()
    """Allocations to stop, so that one of a higher priority can start when they have ended."""


def decide(
    running: Sequence[RunningAllocation], pending: Sequence[PendingAllocation], slots: Sequence[int]
) -> Decision:
    """Decide which allocations start and which stop; equal arguments, in any order, give equal decisions.

    Allocations are served by priority, and within one the older experiment and its older trial first. The first that
    does not fit keeps the free slots and everything behind it waits, so that an allocation of many slots does not
    starve. Outside the queue are those without slots, those limited by their own experiment, and those that want more
    than there is. For one that does not fit, allocations of lower priorities stop, the lowest and latest first, and no
    more than it needs; if all of them would not suffice, none.

    Args:
        running: All allocations that hold slots, also those about to end.
        pending: All that wait.
        slots: IDs of all slots.
    """
    return _Round(running, slots).serve(sorted(pending, key=lambda allocation: allocation.turn))


class _Round:
    """One decision in the making."""

    def __init__(self, running: Sequence[RunningAllocation], slots: Sequence[int]) -> None:
        self._slots = frozenset(slots)
        self._free = sorted(self._slots - {slot for allocation in running for slot in allocation.slot_ids})
        self._coming = sum(self._yield_of(allocation) for allocation in running if allocation.ending)
        """Slots that come free and are not promised yet."""
        candidates = [allocation for allocation in running if not allocation.ending]
        self._victims = sorted(candidates, key=lambda allocation: allocation.turn, reverse=True)
        self._used: Counter[int] = Counter()
        for allocation in running:
            self._used[allocation.experiment_id] += len(allocation.slot_ids)
        self._start: list[Placement] = []
        self._preempt: list[RunningAllocation] = []

    def serve(self, queue: Sequence[PendingAllocation]) -> Decision:
        """Return the decision on allocations in the order of their turns."""
        is_open = True
        for allocation in queue:
            limit = len(self._slots) if allocation.max_slots is None else allocation.max_slots
            if allocation.slots == 0:
                self._start.append(Placement(allocation, ()))
            elif allocation.slots > min(limit, len(self._slots)):
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
        missing = allocation.slots - len(self._free)
        if missing > 0:
            victims = self._choose_victims(allocation, missing - self._coming)
            if victims is None:
                return False
            self._preempt += victims
            self._victims = [victim for victim in self._victims if victim not in victims]
            self._coming += sum(map(self._yield_of, victims)) - missing
            self._free = []
        else:
            self._start.append(Placement(allocation, tuple(self._free[: allocation.slots])))
            self._free = self._free[allocation.slots :]
        self._used[allocation.experiment_id] += allocation.slots
        return True

    def _choose_victims(self, allocation: PendingAllocation, missing: int) -> list[RunningAllocation] | None:
        """Return victims that free ``missing`` slots for an allocation, or None if there are not enough."""
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

    def _yield_of(self, allocation: RunningAllocation) -> int:
        """Return how many slots come free when an allocation ends; a slot may be gone since it started."""
        return len(self._slots.intersection(allocation.slot_ids))
