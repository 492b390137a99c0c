"""Which ``should_preempt()`` call all ranks stop at: the agreement, without any I/O.

Every rank counts its calls. When a stop is requested, the chief asks each rank how many calls it has begun; from the
moment a rank has been asked, its next call waits for the decision. The chief then announces
``stop_at = max(counts) + 1``: no rank has passed that call and every rank that keeps calling in step reaches it, so all
return True from the same call on, and a call in between costs neither a message nor a lock.

One agreement is a round. A stop that a signal or the master asked for stays, so its round is the last. One that only
the script asked for is over for a rank once a call has returned True there, and further rounds may follow; a request
names the round that its rank is in, so that one which arrives late is not taken for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SIGNAL = "signal"
MASTER = "master"
FINAL = (MASTER, SIGNAL)
"""The reasons that are preemptions: they outweigh a script's own, and stay."""


class Stop(NamedTuple):
    """A decision: every call from ``call`` on returns True; if it does not stay, the first of them alone."""

    call: int
    reason: str

    @property
    def stays(self) -> bool:
        """Whether it is a preemption."""
        return self.reason in FINAL


class RankSide:
    """What one rank knows. Its training thread writes ``calls`` and ``round``, requests ``own`` and ``reason``, and its
    ipc thread all else.

    A call first counts, then reads ``attention``; asking first sets ``attention``, then reads the count. So a call that
    is not in the answered count sees the flag and waits.
    """

    __slots__ = ("_asked", "attention", "calls", "chief_left_at", "decided", "final", "own", "reason", "round", "stops")

    def __init__(self) -> None:
        self.calls = 0
        self.attention = True
        """The next call must take the slow path; starts True because the first call installs the signal handlers."""
        self.round = 0
        """How many stops of the script's are over here."""
        self.decided = 0
        """How many stops were announced here."""
        self.own = 0
        """The number of stops that there will be once the last request of this rank's script is decided."""
        self.reason = ""
        """Why this rank asked last, for a decision without the chief."""
        self.stops: deque[Stop] = deque()
        """Announced, and not reached yet, or staying."""
        self.final = False
        """A stop that stays was announced."""
        self.chief_left_at: int | None = None
        self._asked = 0

    @property
    def waiting(self) -> bool:
        """Whether the next call has to wait for a decision."""
        return max(self._asked, self.own) > self.decided

    def asked(self) -> int:
        """The chief asks: how many calls have begun? Returns the answer."""
        self._asked = self.decided + 1
        self.attention = True
        return self.calls

    def announced(self, stop: Stop) -> None:
        """The chief has decided."""
        if not self.final:
            self.final = stop.stays
            self.stops.append(stop)
        self.decided += 1
        self.attention = True

    def chief_left(self, calls: int) -> None:
        """The chief closed after ``calls`` calls: in step, no other rank has made or will make more before it stops."""
        self.chief_left_at = calls
        if self.waiting:
            self.announced(Stop(calls + 1, self.reason))

    def request(self, reason: str) -> None:
        """A stop is requested at this rank, in whichever thread, or in a signal handler: its next call waits."""
        if reason in FINAL or self.reason not in FINAL:
            self.reason = reason
        self.own = max(self.own, self.round + 1)
        self.attention = True

    def alone(self, reason: str) -> bool:
        """Decide a request here, if the chief has left; else False: it is for the chief to hear of."""
        if self.chief_left_at is None:
            return False
        if reason in FINAL or self.waiting:
            self.announced(Stop(self.chief_left_at + 1, reason))
        return True

    def verdict(self) -> Stop | None:
        """The stop because of which the call that has just been counted returns True, if it does.

        A stop that does not stay is over with that.
        """
        if not self.stops or self.calls < self.stops[0].call:
            return None
        if self.stops[0].stays:
            return self.stops[0]
        self.round += 1
        return self.stops.popleft()


class ChiefSide:
    """What the chief collects: one answer or one final count from every rank, itself included."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._present = set(ranks)
        self._unanswered: set[int] = set()
        self._counts = dict.fromkeys(self._present, 0)
        self._reasons: deque[str] = deque()
        self._last = 0
        self._final = False
        self.open = False
        self.round = 0
        """How many stops were decided."""

    def requested(self, reason: str, round_: int) -> frozenset[int]:
        """A stop is requested by a rank that is in ``round_``: the ranks to ask now, if they were not asked before.

        Safe in a signal handler, and in a thread beside the one that calls :meth:`decide`: the reason is there first.
        """
        if self._final or (round_ < self.round and reason not in FINAL):
            return frozenset()
        self._reasons.append(reason)
        if self.open:
            return frozenset()
        self._unanswered = set(self._present)
        self.open = True
        return frozenset(self._unanswered)

    def answered(self, rank: int, calls: int) -> Stop | None:
        """``rank`` has begun ``calls`` calls. Returns the decision if this makes it."""
        self._unanswered.discard(rank)
        self._counts[rank] = max(calls, self._counts[rank])
        return self.decide()

    def left(self, rank: int, calls: int) -> Stop | None:
        """``rank`` closed after ``calls`` calls: it is not asked any more. Returns the decision if this makes it.

        If it has answered, it cannot have made more calls than it said, plus the one that waits.
        """
        self._present.discard(rank)
        return self.answered(rank, calls)

    def decide(self, call: int | None = None) -> Stop | None:
        """The decision, once, as soon as a round is open and every rank has answered.

        Args:
            call: the call to stop at, whoever has answered; None: as the ranks agree.
        """
        if not self.open or (self._unanswered and call is None):
            return None
        self.open = False
        reasons = [self._reasons.popleft() for _ in range(len(self._reasons))]
        if not reasons:  # a request that came while the last decision was made is part of it
            return None
        self._last = max(*self._counts.values(), self._last) + 1 if call is None else call
        self.round += 1
        stop = Stop(self._last, next((reason for reason in FINAL if reason in reasons), reasons[0]))
        self._final = stop.stays
        return stop
