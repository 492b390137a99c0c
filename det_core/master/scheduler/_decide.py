"""Who runs on which slots: by age within a priority, and preemption of lower priorities where that helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PRIORITY = 42
"""Of experiments that say nothing; 1 is the first, 99 the last."""


@dataclass(frozen=True)
class Wanting:
    """An allocation that waits for slots."""

    allocation_id: str
    experiment_id: int
    trial_id: int
    slots: int
    """How many; 0: none, so that it never has to wait."""
    priority: int = DEFAULT_PRIORITY
    max_slots: int | None = None
    """How many its experiment may use at once."""

    @property
    def turn(self) -> tuple[int, int, int]:
        """Sorts by whose turn it is: by priority, then by age, so that a trial that was preempted keeps its place."""
        return self.priority, self.experiment_id, self.trial_id


@dataclass(frozen=True)
class Running:
    """An allocation that holds slots."""

    allocation_id: str
    experiment_id: int
    trial_id: int
    slot_ids: tuple[int, ...]
    priority: int = DEFAULT_PRIORITY
    ending: bool = False
    """It was told to stop, so that its slots will be free soon."""
    preemptible: bool = True

    @property
    def turn(self) -> tuple[int, int, int]:
        """Sorts by whose turn it would be, were it waiting."""
        return self.priority, self.experiment_id, self.trial_id


@dataclass(frozen=True)
class Start:
    """An allocation that is to be started, with the slots it gets."""

    wanting: Wanting
    slot_ids: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """What is to be done now."""

    start: tuple[Start, ...] = ()
    preempt: tuple[Running, ...] = ()
    """Those that are to stop, so that one of a higher priority can start when they have ended."""
    never: tuple[Wanting, ...] = ()
    """Those that want more slots than there are, or than their experiment may use: they stand in nobody's way."""


def decide(running: Sequence[Running], wanting: Sequence[Wanting], slots: Sequence[int]) -> Decision:
    """Decide who starts and who has to stop. Pure: equal arguments, in any order, give equal decisions.

    They are served by priority, and within one the older experiment and its older trial first. The first that does not
    fit keeps the slots that are free, and whoever is behind it waits, so that nobody who needs many slots starves; only
    those that want no slots, and those held back by the limit of their own experiment, stand outside the queue. One
    that does not fit has allocations of lower priorities stopped, the lowest and latest first, and no more of them than
    it needs; if even all of them would not do, none is.

    Args:
        running: all that hold slots, those that are about to end too.
        wanting: all that wait.
        slots: the ids of all slots there are.
    """
    return _Round(running, slots).serve(sorted(wanting, key=lambda w: w.turn))


class _Round:
    """One decision in the making."""

    def __init__(self, running: Sequence[Running], slots: Sequence[int]) -> None:
        held = {slot for r in running for slot in r.slot_ids}
        self._slots = len(set(slots))
        self._there = frozenset(slots)
        self._free = sorted(self._there - held)
        self._coming = sum(self._gives(r) for r in running if r.ending)
        """Slots of those about to end that nobody has been promised yet."""
        self._victims = sorted(
            (r for r in running if r.preemptible and not r.ending), key=lambda r: r.turn, reverse=True
        )
        self._used = Counter[int]()
        for r in running:
            self._used[r.experiment_id] += len(r.slot_ids)
        self._start: list[Start] = []
        self._preempt: list[Running] = []
        self._never: list[Wanting] = []

    def serve(self, queue: list[Wanting]) -> Decision:
        open_ = True
        for w in queue:
            if w.slots == 0:
                self._start.append(Start(w, ()))
            elif w.slots > min(self._slots, self._slots if w.max_slots is None else w.max_slots):
                self._never.append(w)
            elif open_ and (w.max_slots is None or self._used[w.experiment_id] + w.slots <= w.max_slots):
                open_ = self._take(w)
        return Decision(tuple(self._start), tuple(self._preempt), tuple(self._never))

    def _take(self, w: Wanting) -> bool:
        """Start ``w``, or keep for it what it needs; False if it needs more than can be had: nobody passes it."""
        missing = w.slots - len(self._free)
        if missing > 0:
            victims = self._choose(w, missing - self._coming)
            if victims is None:
                return False
            self._preempt += victims
            self._victims = [v for v in self._victims if v not in victims]
            self._coming += sum(map(self._gives, victims)) - missing
            self._free = []
        else:
            self._start.append(Start(w, tuple(self._free[: w.slots])))
            self._free = self._free[w.slots :]
        self._used[w.experiment_id] += w.slots
        return True

    def _choose(self, w: Wanting, missing: int) -> list[Running] | None:
        """The victims that free ``missing`` slots for ``w``; None if there are not enough."""
        chosen: list[Running] = []
        for victim in self._victims:
            if missing <= 0:
                break
            if victim.priority > w.priority and self._gives(victim):
                chosen.append(victim)
                missing -= self._gives(victim)
        if missing > 0:
            return None
        for victim in reversed(chosen[:]):  # spare first who comes first, if the later ones suffice
            if self._gives(victim) <= -missing:
                chosen.remove(victim)
                missing += self._gives(victim)
        return chosen

    def _gives(self, r: Running) -> int:
        """How many slots are free when ``r`` has ended."""
        return len(self._there.intersection(r.slot_ids))
