"""Agreement of the ranks on the call at which all of them stop, without any I/O.

Every rank counts its calls of ``should_preempt()``. When a stop is requested, the chief asks each rank for its count;
once a rank was asked, its next call waits for the decision. The chief then announces ``stop_at = max(counts) + 1``: no
rank has passed that call, and every rank that keeps calling in step reaches it.

The ranks' ipc threads answer, not their next calls. Let a step be ``all_reduce(); should_preempt()``: A has passed call
5 unasked and waits in all_reduce 6 for B, who was asked before call 5 and waits there: A's call 6 never comes.

One agreement is a round. A preemption holds, so its round is the last. A stop that only the script requested is over
for a rank once a call has returned True there, and further rounds may follow; a request carries the round of its rank,
so that a late one does not count for the next round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SIGNAL = "signal"
MASTER = "master"
PREEMPTION_REASONS = (MASTER, SIGNAL)
"""Reasons that are preemptions; the first of them that is pending outweighs all others."""


class Stop(NamedTuple):
    """A decision: every call from ``call`` on returns True; if it is not a preemption, only the first of them."""

    call: int
    reason: str

    @property
    def is_preemption(self) -> bool:
        """Whether a signal or the master requested it."""
        return self.reason in PREEMPTION_REASONS


class RankState:
    """State of the agreement on one rank.

    The training thread writes ``calls`` and ``round``, the ipc thread most of the rest.

    Attributes:
        calls: number of calls begun.
        needs_slow_path: whether the next call must take the slow path; the first call must.
        round: number of stops that were over here, all of them the script's.
        stops: announced stops that no call has reached yet, or that hold.
        final: whether a preemption was announced.
        chief_left: whether the chief has closed, so that nobody decides any more.
    """

    # Slots, as should_preempt() reads this object after every batch.
    __slots__ = ("_asked", "_decided", "_own", "calls", "chief_left", "final", "needs_slow_path", "round", "stops")

    def __init__(self) -> None:
        self.calls = 0
        self.round = 0
        self.needs_slow_path = True
        self.stops: deque[Stop] = deque()
        self.final = False
        self.chief_left = False
        # Three counts of stops: those announced here, and the counts at which the chief's question and this rank's own
        # request are decided.
        self._decided = 0
        self._asked = 0
        self._own = 0

    @property
    def waiting(self) -> bool:
        """Whether the next call has to wait for a decision."""
        return max(self._asked, self._own) > self._decided and not self.chief_left

    def on_ask(self) -> int:
        """Return the number of calls begun; the next call waits."""
        self._asked = self._decided + 1
        # A call counts first and reads this flag then; here the flag comes first. So a call that is missing in the
        # answer sees the flag, and waits.
        self.needs_slow_path = True
        return self.calls

    def on_stop(self, stop: Stop) -> None:
        """Take in a decision of the chief."""
        if not self.final:
            self.final = stop.is_preemption
            self.stops.append(stop)
        self._decided += 1
        self.needs_slow_path = True

    def request(self) -> None:
        """Make the next call wait, as a stop was requested here. Safe in any thread and in a signal handler."""
        self._own = max(self._own, self.round + 1)
        self.needs_slow_path = True

    def pending_stop(self) -> Stop | None:
        """Return the stop that applies to the call just counted, or None. A stop of the script's ends with that."""
        if not self.stops or self.calls < self.stops[0].call:
            return None
        if self.stops[0].is_preemption:
            return self.stops[0]
        self.round += 1
        return self.stops.popleft()


class ChiefState:
    """State of the agreement on the chief: one answer or one final count from every rank, itself included.

    Attributes:
        unanswered: ranks that were asked and have not answered.
        open: whether a round is open.
        round: number of stops decided.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._present = set(ranks)
        self._counts = dict.fromkeys(self._present, 0)
        self._reasons: deque[str] = deque()
        self._last_call = 0
        self._final = False
        self.round = 0
        self.open = False
        self.unanswered: frozenset[int] = frozenset()

    def on_request(self, reason: str, round_: int) -> frozenset[int]:
        """Record a request of a rank that is in ``round_``; return the ranks to ask.

        Safe in a signal handler, and in another thread than the one that calls :meth:`decide`.
        """
        if self._final or (round_ < self.round and reason not in PREEMPTION_REASONS):
            return frozenset()
        # The reason comes before the round opens: decide(), in another thread, would find an open round without one.
        self._reasons.append(reason)
        if self.open:
            return frozenset()
        self.unanswered = frozenset(self._present)
        self.open = True
        return self.unanswered

    def on_answer(self, rank: int, calls: int) -> Stop | None:
        """Record that ``rank`` has begun ``calls`` calls; return the decision if that completes it."""
        self.unanswered -= {rank}
        self._counts[rank] = max(calls, self._counts[rank])
        return self.decide()

    def on_leave(self, rank: int, calls: int) -> Stop | None:
        """Record that ``rank`` closed after ``calls`` calls; return the decision if that completes it."""
        self._present.discard(rank)
        return self.on_answer(rank, calls)

    def decide(self, call: int | None = None) -> Stop | None:
        """Decide an open round, and return its stop: once every rank has answered, or at ``call`` without asking."""
        if not self.open or (self.unanswered and call is None):
            return None
        self.open = False
        reasons = [self._reasons.popleft() for _ in range(len(self._reasons))]
        if not reasons:  # the round was opened by a request whose reason the last decision has taken with it
            return None
        if call is None:
            call = max(*self._counts.values(), self._last_call) + 1
        self._last_call = call
        self.round += 1
        stop = Stop(call, next((reason for reason in PREEMPTION_REASONS if reason in reasons), reasons[0]))
        self._final = stop.is_preemption
        return stop
