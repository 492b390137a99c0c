"""When to stop: requests by signal or by a master, agreed on by all ranks."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from det_core import _clock
from det_core._errors import ContextClosed
from det_core.backend import Backend
from det_core.core._distributed import DistributedContext
from det_core.core._preempt._agreement import ChiefSide, RankSide
from det_core.core._preempt._poll import Poll
from det_core.core._preempt._signals import SignalWatch

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
    each rank does in the mode WorkersAskMaster.

    Args:
        distributed: the ranks that decide together.
        preempt_mode: see :class:`PreemptMode`.
        acknowledge: tells the backend that this process stops because it was preempted.
        record: journals a fact under a kind.
        master: who says when to stop; None: signals do.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
        *,
        acknowledge: Callable[[], None],
        record: Callable[[str, Mapping[str, Any]], None],
        master: Backend | None = None,
    ) -> None:
        self._distributed = distributed
        self._mode = preempt_mode
        self._acknowledge = acknowledge
        self._record = record
        self._star = distributed.star
        self._side = RankSide()
        self._chief = ChiefSide(range(distributed.size)) if distributed.rank == 0 else None
        self._signals = SignalWatch(self._on_signal) if master is None else None
        speaks = distributed.rank == 0 or preempt_mode is PreemptMode.WorkersAskMaster
        self._poll = Poll(master, self._on_signal) if master is not None and speaks else None
        self._changed = threading.Event()
        self._requested_at: float | None = None
        self._started = self._closed = self._left = self._acknowledged = self._troubled = False
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
        """When this rank first heard of a request to stop, on the monotonic clock; None: not yet."""
        return self._requested_at

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Whether to save and exit now. Cheap enough for every batch.

        Args:
            auto_ack: on the first True, acknowledge at once; else call :meth:`acknowledge_preemption_signal` before
                exiting, if the script complies.

        Returns:
            True from the agreed call on, on every rank alike in the mode ``WorkersAskChief``.

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
        try:
            if self._poll is not None:
                self._poll.close()
            self._leave_agreement()
        finally:
            self._side.attention = True
            stopped = self._star is not None and self._side.verdict()
            if self._signals is not None:
                self._signals.restore(term_may_follow=self._troubled or stopped)

    # The slow path of should_preempt(): the first call, and every call from a request on.

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
        while self._side.waiting_for_decision:
            self._changed.wait()
            self._changed.clear()
            self._distributed.check()
        if not self._side.verdict():
            return False
        speaks = self._distributed.rank == 0 or self._mode is PreemptMode.WorkersAskMaster
        if auto_ack and speaks:
            self.acknowledge_preemption_signal()
        return True

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        if self._signals is not None and not self._signals.install():
            logger.warning(
                "the first should_preempt() call is not on the main thread, so signals will not preempt this run: "
                "call it once on the main thread first"
            )
        side = self._side
        side.attention = False
        if side.waiting_for_decision or side.stop_at is not None or self._troubled:
            side.attention = True

    # Requests. _on_signal runs in a signal handler or in the thread that asks the master, all else on the ipc thread.

    def _note(self) -> None:
        if self._requested_at is None:
            self._requested_at = _clock.monotonic()

    def _on_signal(self) -> None:
        self._note()
        if self._star is None:
            self._side.announced(self._side.calls + 1)
        else:
            self._star.call_soon(self._request)

    def _request(self) -> None:
        if self._chief is None:
            if self._side.request():
                self._changed.set()
            elif self._star is not None:
                self._star.post(_TOPIC, ("request", 0))
        elif not self._left:
            self._request_at_chief(self._chief)

    def _request_at_chief(self, chief: ChiefSide) -> None:
        if self._mode is PreemptMode.ChiefOnly:
            self._announce(self._side.calls + 1, tell=False)
        elif self._mode is PreemptMode.WorkersAskMaster:
            self._announce(0, tell=True)
        else:
            for rank in sorted(chief.requested()):
                if rank == 0:
                    self._count(0, self._side.asked())
                elif self._star is not None:
                    self._star.post(_TOPIC, ("ask", 0), to=rank)

    def _on_message(self, rank: int, message: tuple[str, int]) -> None:
        word, number = message
        if word == "request":
            self._request()
        elif word == "ask" and self._star is not None:
            self._star.post(_TOPIC, ("count", self._side.asked()))
        elif word == "stop":
            self._announce(number, tell=False)
        elif rank == 0:
            self._side.chief_left(number)
            self._changed.set()
        else:
            self._count(rank, number)

    def _count(self, rank: int, calls: int) -> None:
        if self._chief is not None and (stop_at := self._chief.answered(rank, calls)) is not None:
            self._announce(stop_at, tell=True)

    def _announce(self, stop_at: int, *, tell: bool) -> None:
        self._note()
        if tell and self._star is not None:
            self._star.post(_TOPIC, ("stop", stop_at))
        self._side.announced(stop_at)
        self._changed.set()

    def _on_trouble(self) -> None:
        self._troubled = True
        self._side.attention = True
        self._changed.set()

    def _leave_agreement(self) -> None:
        star = self._star
        if star is None:
            return
        while self._side.waiting_for_decision and not self._troubled:
            self._changed.wait()
            self._changed.clear()
        said = threading.Event()

        def leave() -> None:
            self._left = True
            star.post(_TOPIC, ("left", self._side.calls))
            if self._chief is not None:
                self._count(0, self._side.calls)
            said.set()

        star.call_soon(leave)
        said.wait(timeout=10)
