"""When to stop: asked for by a signal, a master or the script, and agreed on by all ranks without any I/O per call.

The agreement itself is in :mod:`det_core.core._agreement`; here are its messages, and who asks for a stop.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from random import SystemRandom
from typing import Any

from det_core import _clock
from det_core.backend import Backend
from det_core.core._agreement import MASTER, PREEMPTION_REASONS, SIGNAL, ChiefState, RankState, Stop
from det_core.core._distributed import DistributedContext
from det_core.core._signals import PreemptionSignals
from det_core.core._worker_signals import protect_workers
from det_core.errors import CollectiveTimeout, ContextClosed, DetCoreError

logger = logging.getLogger("det_core.core")

WARN_AFTER = 10.0
"""Seconds of waiting for other ranks after which a warning names them."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at deadline and warning while a call waits."""
CLOSE_TIMEOUT = 10.0
"""Seconds that other threads get when the context is closed."""
LONG_POLL_TIMEOUT = 60.0
"""Seconds that the master may hold a question before it says that there is nothing to say."""
MIN_RETRY_DELAY, MAX_RETRY_DELAY = 0.25, 3.0
"""Seconds before a question that was not answered is asked again, doubled each time."""


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

    A bare run is preempted by SIGTERM, SIGINT, SIGHUP or SIGUSR1 to any one of its ranks, caught from the first
    :meth:`should_preempt` call on; workers of a DataLoader leave them to it. Under a master, only its request counts:
    the chief waits for it in a thread, or each rank does in the mode WorkersAskMaster. Any rank's script may ask for a
    stop as well: :meth:`request`.

    ``core.init()`` makes one. Made by hand, from ``distributed`` alone, it is the agreement on :meth:`request` without
    anything else: no signals, no master, no record. It is closed with ``distributed``, which has one at a time.

    Args:
        distributed: the ranks that decide together.
        preempt_mode: see :class:`PreemptMode`.
        acknowledge: tells the backend that this process stops because it was preempted.
        record: journals a fact under a kind.
        master: who says when to stop.
        signals: whether signals do, where there is no master.
        grace: seconds from a signal until this process may be killed; None: not known.
        launched: whether a launcher passes its signals on to this process.

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
        grace: float | None = None,
        launched: bool = False,
    ) -> None:
        # Numbered, as the last words of a context that was closed may reach the next one on other ranks.
        self._topic = f"preempt {distributed.attach('PreemptContext', self.close)}"
        self._distributed, self._communicator = distributed, distributed.communicator
        self._mode = preempt_mode
        self._acknowledge, self._record = acknowledge, record
        self._side = RankState()
        self._chief = ChiefState(range(distributed.size)) if distributed.rank == 0 else None
        self._signals = PreemptionSignals(partial(self._request_stop, SIGNAL)) if signals and master is None else None
        self._asks_master = self._chief is not None or preempt_mode is PreemptMode.WorkersAskMaster  # to the master
        self._master = master if self._asks_master else None
        self._grace = grace
        self._launched = launched
        self._poll: threading.Thread | None = None
        self._poll_failure: Exception | None = None
        self._closing, self._changed = threading.Event(), threading.Event()
        self._requested_at: float | None = None
        self._first_call_at: float | None = None
        self._reason: str | None = None
        self._stopped_at = 0
        self._stop_seen_at: float | None = None  # when a call returned True for the stop that counts now
        self._left = self._acknowledged = self._timed_out = False
        # For warnings: on the chief the ranks whose first call was not heard of, on a worker whom a decision waits for.
        in_step = self._chief is not None and preempt_mode is PreemptMode.WorkersAskChief
        self._never_called = set(range(1, distributed.size)) if in_step else set()
        self._missing = "rank 0"
        if self._communicator is not None:
            self._communicator.subscribe(self._topic, self._on_message)
            self._communicator.on_abort(self._wake)

    def start(self) -> None:
        """Protect the workers of loaders, and begin to wait for a master's request; :meth:`close` ends the latter."""
        protect_workers()
        if self._master is not None:
            ask = partial(self._ask_master, self._master)
            self._poll = threading.Thread(target=ask, name="det-core-preempt", daemon=True)
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
            CollectiveTimeout: the ranks could not agree within ``DET_CORE_TIMEOUT``, where that is set.
            DetCoreError: the thread that asks the master has failed, so no later call would return True.
            RuntimeError: called on a worker in the mode ``ChiefOnly``.
            ContextClosed: the context is closed.
        """
        side = self._side
        side.calls += 1
        if not side.needs_slow_path:
            return False
        return self._should_preempt_slow(auto_ack)

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
        if reason in PREEMPTION_REASONS:
            raise ValueError(f"reason={reason!r} stands for a preemption that the script did not ask for")
        if self._closing.is_set():
            raise ContextClosed("request() was called on a context that is closed")
        self._request_stop(reason)

    def acknowledge_preemption_signal(self) -> None:
        """Say that this process stops, unfinished, because it was asked to, and expects to be run again."""
        if self._closing.is_set():
            raise ContextClosed("acknowledge_preemption_signal() was called on a context that is closed")
        if self._acknowledged:
            return
        self._record("preempt", {"acknowledged": True, "call": self._side.calls})
        self._acknowledge()
        self._acknowledged = True

    def close(self) -> None:
        """Finish an open agreement, tell the others how many calls were made here, and restore the handlers.

        Raises:
            DetCoreError: the thread that asks the master has failed, and no call has said so.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._distributed.detach("PreemptContext")
        try:
            if self._poll is not None and self._master is not None:
                self._master.stop_waiting()
                self._poll.join(CLOSE_TIMEOUT)
            self._send_final_count()
        finally:
            self._side.needs_slow_path = True
            if self._signals is not None:
                ignored = 0
                if self._side.final and (self._launched or self._communicator is not None):
                    # A scheduler signals every process, and a launcher every rank once more: both may come after the
                    # signal to another rank has stopped this one.
                    ignored = 2
                elif self._broken:
                    ignored = 1  # a launcher ends the others a moment after one was lost
                self._signals.restore(ignored=ignored)
        self._raise_poll_failure()

    # The slow path of should_preempt(): the first call, and the calls around a request.

    def _should_preempt_slow(self, auto_ack: bool) -> bool:
        side = self._side
        if self._closing.is_set():
            raise ContextClosed("should_preempt() was called on a context that is closed")
        if self._mode is PreemptMode.ChiefOnly and self._chief is None:
            rank = self._distributed.rank
            raise RuntimeError(f"rank {rank} called should_preempt(), which the mode ChiefOnly allows on rank 0 alone")
        if self._first_call_at is None:
            self._begin()
        if self._communicator is None and self._chief is not None:
            self._announce(self._chief.decide(side.calls))
        self._await_decision()
        # Before any stop is believed: a launcher's SIGTERM comes a tenth of a second after the death of a rank.
        self._distributed.check()
        self._raise_poll_failure()
        stop = side.pending_stop()
        side.needs_slow_path = False  # first off, then on again: what happens in between must not be passed over
        if side.waiting or side.stops or self._broken or self._poll_failure or self._check_never_called():
            side.needs_slow_path = True
        if stop is None:
            return False
        self._reason = stop.reason
        if stop.reason == SIGNAL and self._stop_seen_at is None:
            self._note_answer()
        if self._stop_seen_at is None or not stop.is_preemption:
            self._stop_seen_at = _clock.monotonic()
        if not stop.is_preemption:
            self._stopped_at = side.calls
        elif auto_ack and self._asks_master:
            self.acknowledge_preemption_signal()
        return True

    def _note_answer(self) -> None:
        """Record that this rank knows of the stop, and warn on the chief if that took too long."""
        self._record("should_preempt", {"stopped": True})
        waited = _clock.monotonic() - (self._requested_at or _clock.monotonic())
        if self._chief is not None and self._grace is not None and waited > self._grace:
            logger.warning(
                "should_preempt() was called %.0f s after the signal to stop, and the grace period is %g s, after "
                "which a process is killed unsaved: call it after every batch, or set DET_CORE_GRACE",
                waited, self._grace,
            )  # fmt: skip

    def _begin(self) -> None:
        self._first_call_at = _clock.monotonic()
        if self._signals is not None:
            self._record("should_preempt", {})  # a run without it that died could not have been stopped in order
            if not self._signals.install():
                logger.warning(
                    "the first should_preempt() call is not on the main thread, so signals will not preempt this run: "
                    "call it once on the main thread first"
                )
        if self._chief is None:
            self._post("began")

    def _check_never_called(self) -> bool:
        """On the chief, whether to look for ranks that never call; after a while they are named, once."""
        is_late = self._side.calls > 2 and _clock.monotonic() - (self._first_call_at or 0.0) > WARN_AFTER
        if is_late and (silent := sorted(tuple(self._never_called))):
            self._never_called.clear()
            logger.warning(
                "rank 0 calls should_preempt(), and rank %s never did: each rank has to, in step, or it will not stop "
                "with the others. If rank 0 alone is to ask: core.init(preempt_mode=core.PreemptMode.ChiefOnly)",
                ", ".join(map(str, silent)),
            )
        return bool(self._never_called)

    def _await_decision(self) -> None:
        """Wait for as long as a decision is open and every rank lives; say for whom."""
        side, timeout = self._side, self._distributed.timeout
        began, warned, asked = _clock.monotonic(), "", self._chief is not None
        while self._communicator is not None and side.waiting and not self._broken:
            if self._changed.wait(POLL_INTERVAL):
                self._changed.clear()
                continue
            waited, missing = _clock.monotonic() - began, self._unanswered() or self._missing
            if timeout is not None and waited >= timeout:
                self._timed_out = True
                raise CollectiveTimeout(
                    f"should_preempt() (call {side.calls}) took longer than {timeout:g} s: waits for {missing}"
                )
            if waited >= WARN_AFTER / 2 and not asked:
                asked = True
                self._post("who")  # the answer is there by the time of the warning
            if waited >= WARN_AFTER and not warned:
                warned = missing
                logger.warning(
                    "should_preempt() (call %d), where the ranks agree on a stop, has waited for %.0f s for %s; it may "
                    "be suspended, or wait for memory or a disk", side.calls, waited, missing,
                )  # fmt: skip
        if warned and not self._broken:
            logger.warning("%s is back after %.0f s", warned, _clock.monotonic() - began)

    def _unanswered(self) -> str:
        """On the chief, whom an open decision waits for."""
        if self._chief is None or self._communicator is None:
            return ""
        return ", ".join(
            f"rank {r} (last call: {self._communicator.last_call(r)})" for r in sorted(self._chief.unanswered)
        )

    # Requests. _request_stop runs in a signal handler, in the thread that asks the master, or in one of the script's;
    # all else on the ipc thread, or, where there is none, in the next call.

    def _request_stop(self, reason: str) -> None:
        if reason in PREEMPTION_REASONS and self._requested_at is None:
            self._requested_at = _clock.monotonic()
            if reason == SIGNAL:  # all that is known of it, if the process is killed before its next call
                self._record("preempt_request", {})
        side, star = self._side, self._communicator
        round_ = side.round
        if star is None:
            self._request(reason, round_)
            side.request()
            return
        if self._chief is not None or self._mode is not PreemptMode.ChiefOnly:
            side.request()  # this rank calls should_preempt(), and waits there
        star.call_soon(lambda: self._request(reason, round_))

    def _request(self, reason: str, round_: int) -> None:
        chief, only = self._chief, self._mode is PreemptMode.ChiefOnly
        if chief is None:
            self._post("request", round_, reason)
        elif not self._left:
            to_ask = chief.on_request(reason, self._side.round if only else round_)  # the only rank that makes calls
            if self._communicator is None:
                return  # the next call decides
            if self._mode is not PreemptMode.WorkersAskChief:
                self._announce(chief.decide(0))  # the next call, even one that waits for this already
                return
            for rank in sorted(to_ask):
                if rank:
                    self._post("ask", to=rank)
                else:
                    self._announce(chief.on_answer(0, self._side.on_ask()))

    def _on_message(self, rank: int, message: tuple[str, int, str]) -> None:
        """``rank`` has said something: a worker to the chief, or the chief to a worker."""
        word, number, text = message
        if (chief := self._chief) is not None:
            match word:
                case "began":
                    self._never_called.discard(rank)
                case "request":
                    self._request(text, number)
                case "count":
                    self._announce(chief.on_answer(rank, number))
                case "left":
                    self._announce(chief.on_leave(rank, number))
                case "who":
                    self._post("missing", text=self._unanswered(), to=rank)
            return
        match word:
            case "ask":
                self._post("count", self._side.on_ask())
            case "stop":
                self._announce(Stop(number, text))
            case "missing":
                self._missing = text or self._missing
            case "left":
                self._side.chief_left = True
                self._changed.set()

    def _announce(self, stop: Stop | None) -> None:
        """A stop is decided, if it is: on the chief tell the others."""
        if stop is None:
            return
        if stop.is_preemption:
            self._requested_at = self._requested_at or _clock.monotonic()
        if self._chief is not None and self._mode is not PreemptMode.ChiefOnly and not self._left:
            self._post("stop", stop.call, stop.reason)
        self._side.on_stop(stop)
        self._changed.set()

    def _post(self, word: str, number: int = 0, text: str = "", to: int | None = None) -> None:
        if self._communicator is not None:
            self._communicator.post(self._topic, (word, number, text), to=to)

    @property
    def _broken(self) -> bool:
        # Asked of the star: a collective of the main thread may raise before _wake() is called.
        return self._communicator is not None and self._communicator.abort_reason is not None

    def _wake(self) -> None:
        self._side.needs_slow_path = True
        self._changed.set()

    def _send_final_count(self) -> None:
        """Finish an open agreement, and tell the others that no more calls are made here."""
        star, said = self._communicator, threading.Event()
        if star is None or self._broken:  # nobody agrees any more; or this is a forked child
            return

        def leave() -> None:
            self._left = True
            self._post("left", self._side.calls)
            if self._chief is not None:
                self._announce(self._chief.on_leave(0, self._side.calls))
            said.set()

        try:
            if not self._timed_out:
                self._await_decision()
        finally:
            star.call_soon(leave)
            said.wait(CLOSE_TIMEOUT)

    # The master

    def _ask_master(self, master: Backend) -> None:
        """Ask, in a thread, until it says yes. A question without an answer is asked again; what else fails is kept."""
        jitter = SystemRandom()  # the global generator's numbers are the script's
        hold, pause, warned = 0.0, MIN_RETRY_DELAY, False  # answered at once, to learn whether there are answers
        while not self._closing.is_set():
            try:
                if master.preempted(hold):
                    return self._request_stop(MASTER)
                hold, pause, warned = LONG_POLL_TIMEOUT, MIN_RETRY_DELAY, False
            except Exception as e:
                if self._closing.is_set():
                    return
                if not isinstance(e, DetCoreError):
                    self._poll_failure = e
                    return self._wake()
                level = logging.DEBUG if warned else logging.WARNING
                logger.log(level, "whether to stop cannot be asked, and is asked again and again: %s", e)
                warned = True
                self._closing.wait(pause * jitter.uniform(0.5, 1.0))  # so that many trials do not come together
                pause = min(2 * pause, MAX_RETRY_DELAY)

    def _raise_poll_failure(self) -> None:
        failure, self._poll_failure = self._poll_failure, None
        if failure is not None:
            raise DetCoreError(
                "the master cannot be asked any more whether to stop, so this trial would never be preempted: "
                f"{type(failure).__name__}: {failure}"
            ) from failure
