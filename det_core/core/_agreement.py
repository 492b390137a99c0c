"""The ranks' agreement on the call at which all stop, without any I/O.

Every rank counts its calls of ``should_preempt()``. When a stop is requested, the chief asks each rank how many calls
it has begun; from the moment a rank was asked, its next call waits for the decision. The chief then announces
``stop_at = max(counts) + 1``: no rank has passed that call, and every rank that keeps calling in step reaches it.

The ranks' ipc threads answer, not their next calls. Let a step be ``all_reduce(); should_preempt()``: A has passed call
5 unasked and waits in all_reduce 6 for B, who was asked before call 5 and waits there: A's call 6 never comes.

One agreement is a round. A stop that a signal or the master asked for stays, so its round is the last. One that only
the script asked for is over for a rank once a call has returned True there, and further rounds may follow; a request
names the round that its rank is in, so that one which arrives late is not taken for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SIGNAL, MASTER = "signal", "master"
PREEMPTION_REASONS = (MASTER, SIGNAL)
"""The reasons that are preemptions: they outweigh a script's own, and stay."""


class Stop(NamedTuple):
    """A decision: every call from ``call`` on returns True; if it does not stay, the first of them alone."""

    call: int
    reason: str

    @property
    def is_preemption(self) -> bool:
        """Whether it is a preemption."""
        return self.reason in PREEMPTION_REASONS


class RankState:
    """What one rank knows. Its training thread writes ``calls`` and ``round``, its ipc thread most of the rest.

    A call first counts, then reads ``attention``; asking first sets ``attention``, then reads the count. So a call that
    is not in the answered count sees the flag and waits.

    Attributes:
        calls: how many have begun.
        attention: the next call must take the slow path, as the first one has to.
        round: how many stops of the script's are over here.
        stops: announced, and not reached yet, or staying.
        final: a stop that stays was announced.
        chief_left: the chief has closed: the job ends, and nobody decides any more.
    """

    __slots__ = ("_asked", "_decided", "_own", "calls", "chief_left", "final", "needs_slow_path", "round", "stops")

    def __init__(self) -> None:
        self.calls = self.round = 0
        self.needs_slow_path = True
        self.stops: deque[Stop] = deque()
        self.final = self.chief_left = False
        # Numbers of stops: announced here; when what the chief has asked about, and what was requested here, is decided
        self._decided = self._asked = self._own = 0

    @property
    def waiting(self) -> bool:
        """Whether the next call has to wait for a decision."""
        return max(self._asked, self._own) > self._decided and not self.chief_left

    def on_ask(self) -> int:
        """The chief asks: how many calls have begun? Returns the answer."""
        self._asked = self._decided + 1
        self.needs_slow_path = True
        return self.calls

    def on_stop(self, stop: Stop) -> None:
        """The chief has decided."""
        if not self.final:
            self.final = stop.is_preemption
            self.stops.append(stop)
        self._decided += 1
        self.needs_slow_path = True

    def request(self) -> None:
        """A stop is requested at this rank, in whichever thread, or in a signal handler: its next call waits."""
        self._own = max(self._own, self.round + 1)
        self.needs_slow_path = True

    def pending_stop(self) -> Stop | None:
        """The stop because of which the call just counted returns True. One that does not stay is over with that."""
        if not self.stops or self.calls < self.stops[0].call:
            return None
        if self.stops[0].is_preemption:
            return self.stops[0]
        self.round += 1
        return self.stops.popleft()


class ChiefState:
    """What the chief collects: one answer or one final count from every rank, itself included.

    Attributes:
        unanswered: the ranks that were asked, and have not said how many calls they made.
        open: a round is open.
        round: how many stops were decided.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._present = set(ranks)
        self._counts = dict.fromkeys(self._present, 0)
        self._reasons: deque[str] = deque()
        self._last = self.round = 0
        self._final = self.open = False
        self.unanswered: frozenset[int] = frozenset()

    def on_request(self, reason: str, round_: int) -> frozenset[int]:
        """A stop is requested by a rank that is in ``round_``: the ranks to ask now, if they were not asked before.

        Safe in a signal handler, and in a thread beside the one that calls :meth:`decide`: the reason is there first.
        """
        if self._final or (round_ < self.round and reason not in PREEMPTION_REASONS):
            return frozenset()
        self._reasons.append(reason)
        if self.open:
            return frozenset()
        self.unanswered = frozenset(self._present)
        self.open = True
        return self.unanswered

    def on_answer(self, rank: int, calls: int) -> Stop | None:
        """``rank`` has begun ``calls`` calls. Returns the decision if this makes it."""
        self.unanswered -= {rank}
        self._counts[rank] = max(calls, self._counts[rank])
        return self.decide()

    def on_leave(self, rank: int, calls: int) -> Stop | None:
        """``rank`` closed after ``calls`` calls: it is not asked any more. Returns the decision if this makes it."""
        self._present.discard(rank)
        return self.on_answer(rank, calls)

    def decide(self, call: int | None = None) -> Stop | None:
        """The decision, once, as soon as a round is open and every rank has answered; at ``call`` without asking."""
        if not self.open or (self.unanswered and call is None):
            return None
        self.open = False
        reasons = [self._reasons.popleft() for _ in range(len(self._reasons))]
        if not reasons:  # a request that came while the last decision was made is part of it
            return None
        self._last = max(*self._counts.values(), self._last) + 1 if call is None else call
        self.round += 1
        stop = Stop(self._last, next((reason for reason in PREEMPTION_REASONS if reason in reasons), reasons[0]))
        self._final = stop.is_preemption
        return stop
