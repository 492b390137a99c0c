"""Which ``should_preempt()`` call all ranks stop at: the agreement, without any I/O.

Every rank counts its calls. When a preemption is requested, the chief asks each rank how many calls it has begun; from
the moment a rank has been asked, its next call waits for the decision. The chief then announces
``stop_at = max(counts) + 1``: no rank has passed that call and every rank that keeps calling in step reaches it, so all
return True from the same call on, and a call in between costs neither a message nor a lock.
"""

from __future__ import annotations

from collections.abc import Iterable


class RankSide:
    """What one rank knows. Written by its training thread (``calls``) and by its ipc thread (all else).

    A call first counts, then reads ``attention``; asking first sets ``attention``, then reads the count. So a call that
    is not in the answered count sees the flag and waits.
    """

    __slots__ = ("attention", "calls", "chief_left_at", "requested", "stop_at", "waiting_for_decision")

    def __init__(self) -> None:
        self.calls = 0
        self.attention = True
        """The next call must take the slow path; starts True because the first call installs the signal handlers."""
        self.waiting_for_decision = False
        self.requested = False
        self.stop_at: int | None = None
        self.chief_left_at: int | None = None

    def asked(self) -> int:
        """The chief asks: how many calls have begun? Returns the answer."""
        self.waiting_for_decision = True
        self.attention = True
        return self.calls

    def announced(self, stop_at: int) -> None:
        """The chief has decided. The first decision stands."""
        if self.stop_at is None:
            self.stop_at = stop_at
        self.waiting_for_decision = False
        self.attention = True

    def chief_left(self, calls: int) -> None:
        """The chief closed after ``calls`` calls: in step, no other rank has made or will make more before it stops."""
        self.chief_left_at = calls
        if self.waiting_for_decision or self.requested:
            self.announced(calls + 1)

    def request(self) -> bool:
        """A preemption is requested at this rank. True: decided here, since the chief has left; else, ask the chief."""
        self.requested = True
        if self.chief_left_at is None:
            return False
        self.announced(self.chief_left_at + 1)
        return True

    def verdict(self) -> bool:
        """Does the call that has just been counted return True?"""
        return self.stop_at is not None and self.calls >= self.stop_at


class ChiefSide:
    """What the chief collects: one answer or one final count from every rank, itself included."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._unanswered = set(ranks)
        self._counts: dict[int, int] = {}
        self.open = False
        self.stop_at: int | None = None

    def requested(self) -> frozenset[int]:
        """A preemption is requested: the ranks to ask now; none if that was done before."""
        if self.open or self.stop_at is not None:
            return frozenset()
        self.open = True
        return frozenset(self._unanswered)

    def answered(self, rank: int, calls: int) -> int | None:
        """``rank`` has begun ``calls`` calls (or left after them). Returns ``stop_at`` when that decides it.

        A rank that leaves before anything was requested counts as answered; one that leaves after it has answered
        cannot have made more calls than it said, plus the one that waits.
        """
        self._unanswered.discard(rank)
        self._counts[rank] = max(calls, self._counts.get(rank, 0))
        return self.decide()

    def decide(self) -> int | None:
        """``stop_at``, once, as soon as the agreement is open and every rank has answered."""
        if not self.open or self._unanswered:
            return None
        self.open = False
        self.stop_at = max(self._counts.values()) + 1
        return self.stop_at
