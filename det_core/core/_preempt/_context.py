"""When to stop: requests by signal, by a master or by the script, agreed on by all ranks."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from det_core import _clock
from det_core.backend import Backend
from det_core.core._distributed import DistributedContext
from det_core.core._preempt._agreement import FINAL, MASTER, SIGNAL, ChiefSide, RankSide, Stop
from det_core.core._preempt._poll import Poll
from det_core.core._preempt._signals import SignalWatch
from det_core.errors import ContextClosed

logger = logging.getLogger("det_core.core")
_TOPIC = "preempt"


class PreemptMode(enum.Enum):
    """Who may call :meth:`PreemptContext.should_preempt`, and what the ranks agree on."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    """All ranks call it in step, and all return True from the same call on."""
    ChiefOnly = "CHIEF_ONLY"
    """Only the chief may call it; telling the workers is up to the script."""
    WorkersAskMaster = "WORKERS_ASK_MASTER"
    """Any rank may call it; each returns True at its own next call after the request."""


class PreemptContext:
    """Tells the script when to save and exit.

    A bare run is preempted by SIGTERM, SIGUSR1 or SIGINT to any one of its ranks, caught from the first
    :meth:`should_preempt` call on. Under a master, only its request counts: the chief waits for it in a thread, or
    each rank does in the mode WorkersAskMaster. Any rank's script may ask for a stop as well: :meth:`request`.

    ``core.init()`` makes one. Made by hand, from ``distributed`` alone, it is the agreement on :meth:`request` without
    anything else: no signals, no master, no record. It is closed with ``distributed``, which has one at a time.

    Args:
        distributed: the ranks that decide together.
        preempt_mode: see :class:`PreemptMode`.
        acknowledge: tells the backend that this process stops because it was preempted.
        record: journals a fact under a kind.
        master: who says when to stop.
        signals: whether signals do, where there is no master.

    Raises:
        RuntimeError: ``distributed`` has one already.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
        *,
        acknowledge: Callable[[], None] = lambda: None,
        record: Callable[[str, Mapping[str, Any]], None] = lambda _kind, _body: None,
        master: Backend | None = None,
        signals: bool = False,
    ) -> None:
        self._distributed = distributed
        self._mode = preempt_mode
        self._acknowledge = acknowledge
        self._record = record
        self._star = distributed.star
        self._side = RankSide()
        self._chief = ChiefSide(range(distributed.size)) if distributed.rank == 0 else None
        self._signals = SignalWatch(lambda: self._ask_for(SIGNAL)) if signals and master is None else None
        speaks = distributed.rank == 0 or preempt_mode is PreemptMode.WorkersAskMaster
        self._poll = Poll(master, lambda: self._ask_for(MASTER)) if master is not None and speaks else None
        self._changed = threading.Event()
        self._requested_at: float | None = None
        self._reason: str | None = None
        self._stopped_at = 0
        self._started = self._closed = self._left = self._acknowledged = self._troubled = False
        distributed.attach("PreemptContext", self.close)
        if self._star is not None:
            self._star.subscribe(_TOPIC, self._on_message)
            self._star.on_trouble(self._on_trouble)

    def start(self) -> None:
        """Begin to wait for a master's request; :meth:`close` ends that."""
        if self._poll is not None:
            self._poll.start()

    @property
    def acknowledged(self) -> bool:
        """Whether this process has said that it stops because of a preemption."""
        return self._acknowledged

    @property
    def requested_at(self) -> float | None:
        """When this rank first heard that it is preempted, on the monotonic clock; None: not yet."""
        return self._requested_at

    @property
    def requested(self) -> bool:
        """Whether this rank has heard of a request to stop that no call has returned True for, or that stays.

        A look that is no counted call, for saving in the middle of an evaluation. Ranks hear of a request at different
        moments, so no collective may depend on it.
        """
        side = self._side
        return side.final or side.waiting or bool(side.stops)

    @property
    def reason(self) -> str | None:
        """Why :meth:`should_preempt` has last returned True, equal on every rank; None: it has not.

        ``"signal"``, ``"master"``, or what the script gave to :meth:`request`.
        """
        return self._reason

    @property
    def stopped_by_script(self) -> bool:
        """Whether the last call returned True because of a :meth:`request` alone."""
        return 0 < self._stopped_at == self._side.calls

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Whether to save and exit now. Cheap enough for every batch.

        Args:
            auto_ack: on the first True, acknowledge at once; else call :meth:`acknowledge_preemption_signal` before
                exiting, if the script complies.

        Returns:
            True from the agreed call on, on every rank alike in the mode ``WorkersAskChief``. If only the script asked
            for the stop, True once: later calls return False until the next :meth:`request`.

        Raises:
            PeerLost: a rank has died, so this is no preemption; nothing is acknowledged.
            RuntimeError: called on a worker in the mode ``ChiefOnly``.
            ContextClosed: the context is closed.
        """
        side = self._side
        side.calls += 1
        if not side.attention:
            return False
        return self._look(auto_ack)

    def request(self, reason: str = "") -> None:
        """Ask for a stop of the whole job: early stopping, NaN on one rank, a button. Any rank may, in any thread.

        All ranks return True from one agreed :meth:`should_preempt` call; this rank's next call waits until the ranks
        have agreed. Where they share a collective a step, that is at most two calls later. In the mode ChiefOnly it is
        the chief's next call, in WorkersAskMaster the next one of each rank.

        Such a stop is not acknowledged: a script that exits with status 0 after it is done, and is not started again.
        If a signal or the master asks for a stop before the ranks have agreed, it is a preemption instead.

        Args:
            reason: what :attr:`reason` will be, on every rank.

        Raises:
            ValueError: ``reason`` is one of the words that stand for a preemption.
            ContextClosed: the context is closed.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a string, not {type(reason).__name__}")
        if reason in FINAL:
            raise ValueError(f"reason={reason!r} stands for a preemption that the script did not ask for")
        if self._closed:
            raise ContextClosed("request() was called on a context that is closed")
        self._ask_for(reason)

    def acknowledge_preemption_signal(self) -> None:
        """Say that this process stops, unfinished, because it was asked to, and expects to be run again."""
        if self._closed:
            raise ContextClosed("acknowledge_preemption_signal() was called on a context that is closed")
        if self._acknowledged:
            return
        self._record("preempt", {"acknowledged": True, "call": self._side.calls})
        self._acknowledge()
        self._acknowledged = True

    def close(self) -> None:
        """Finish an open agreement, tell the others how many calls were made here, and restore the handlers."""
        if self._closed:
            return
        self._closed = True
        self._distributed.detach("PreemptContext")
        try:
            if self._poll is not None:
                self._poll.close()
            self._leave_agreement()
        finally:
            self._side.attention = True
            stopped = self._star is not None and self._side.final
            if self._signals is not None:
                self._signals.restore(term_may_follow=self._troubled or stopped)

    # The slow path of should_preempt(): the first call, and the calls around a request.

    def _look(self, auto_ack: bool) -> bool:
        if self._closed:
            raise ContextClosed("should_preempt() was called on a context that is closed")
        if self._mode is PreemptMode.ChiefOnly and self._distributed.rank != 0:
            raise RuntimeError(
                f"rank {self._distributed.rank} called should_preempt(), "
                "which the mode ChiefOnly allows on rank 0 alone"
            )
        self._start()
        self._distributed.check()
        if self._star is None:
            self._decide(self._side.calls)
        else:
            self._await_decision()
        stop = self._side.verdict()
        self._rest()
        if stop is None:
            return False
        self._reason = stop.reason
        if not stop.stays:
            self._stopped_at = self._side.calls
            return True
        speaks = self._distributed.rank == 0 or self._mode is PreemptMode.WorkersAskMaster
        if auto_ack and speaks:
            self.acknowledge_preemption_signal()
        return True

    def _await_decision(self) -> None:
        while self._side.waiting:
            self._changed.wait()
            self._changed.clear()
            self._distributed.check()

    def _rest(self) -> None:
        """Let the next calls be cheap again, unless there is something for them to see."""
        side = self._side
        side.attention = False
        if side.waiting or side.stops or self._troubled:
            side.attention = True

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        if self._signals is not None and not self._signals.install():
            logger.warning(
                "the first should_preempt() call is not on the main thread, so signals will not preempt this run: "
                "call it once on the main thread first"
            )

    # Requests. _ask_for runs in a signal handler, in the thread that asks the master, or in one of the script's; all
    # else on the ipc thread.

    def _note(self) -> None:
        if self._requested_at is None:
            self._requested_at = _clock.monotonic()

    def _ask_for(self, reason: str) -> None:
        if reason in FINAL:
            self._note()
        side, star = self._side, self._star
        if star is None:
            self._request_at_chief(reason, side.round)
            side.request(reason)
        elif self._mode is PreemptMode.ChiefOnly and self._chief is None:
            star.call_soon(lambda: star.post(_TOPIC, ("request", 0, reason)))
        else:
            side.request(reason)
            round_ = side.round
            star.call_soon(lambda: self._request(reason, round_))

    def _request(self, reason: str, round_: int) -> None:
        if self._chief is not None:
            if not self._left:
                self._request_at_chief(reason, round_)
        elif self._side.alone(reason):
            self._changed.set()
        elif self._star is not None:
            self._star.post(_TOPIC, ("request", round_, reason))

    def _request_at_chief(self, reason: str, round_: int) -> None:
        assert self._chief is not None
        if self._mode is PreemptMode.ChiefOnly:
            round_ = self._side.round  # the only rank that makes calls
        to_ask = self._chief.requested(reason, round_)
        if self._star is None:
            return  # the next call decides
        if self._mode is PreemptMode.WorkersAskChief:
            for rank in sorted(to_ask):
                self._ask(rank)
        else:
            self._decide(0)  # the next call, even one that waits for this already

    def _ask(self, rank: int) -> None:
        assert self._chief is not None and self._star is not None
        if rank:
            self._star.post(_TOPIC, ("ask", 0, ""), to=rank)
        else:
            self._announce(self._chief.answered(0, self._side.asked()))

    def _on_message(self, rank: int, message: tuple[str, int, str]) -> None:
        word, number, reason = message
        if word == "request":
            self._request(reason, number)
        elif word == "ask" and self._star is not None:
            self._star.post(_TOPIC, ("count", self._side.asked(), ""))
        elif word == "stop":
            self._announce(Stop(number, reason))
        elif self._chief is None:
            self._side.chief_left(number)
            self._changed.set()
        else:
            self._announce((self._chief.left if word == "left" else self._chief.answered)(rank, number))

    def _decide(self, call: int) -> None:
        """Stop at ``call``, without asking the others."""
        if self._chief is not None:
            self._announce(self._chief.decide(call))

    def _announce(self, stop: Stop | None) -> None:
        """A stop is decided, if it is: on the chief tell the others."""
        if stop is None:
            return
        if stop.stays:
            self._note()
        tells = self._chief is not None and self._mode is not PreemptMode.ChiefOnly and not self._left
        if tells and self._star is not None:  # once the chief has left, each of the others decides by that
            self._star.post(_TOPIC, ("stop", *stop))
        self._side.announced(stop)
        self._changed.set()

    def _on_trouble(self) -> None:
        self._troubled = True
        self._side.attention = True
        self._changed.set()

    def _leave_agreement(self) -> None:
        star = self._star
        if star is None:
            return
        while self._side.waiting and not self._troubled:
            self._changed.wait()
            self._changed.clear()
        said = threading.Event()

        def leave() -> None:
            self._left = True
            star.post(_TOPIC, ("left", self._side.calls, ""))
            if self._chief is not None:
                self._announce(self._chief.left(0, self._side.calls))
            said.set()

        star.call_soon(leave)
        said.wait(timeout=10)
