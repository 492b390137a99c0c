"""When to stop: requested by a signal, a master or the script; agreed by all ranks without any I/O per call.

The agreement itself is in :mod:`det_core.core._agreement`; here are its messages and the sources of requests.
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
"""Seconds after the chief's first call until a warning names ranks that never called."""
POLL_INTERVAL = 0.5
"""Maximum time between two checks of a waiting call, in seconds."""
CLOSE_TIMEOUT = 10.0
"""Maximum wait for other threads in ``close()``, in seconds."""
LONG_POLL_TIMEOUT = 60.0
"""Maximum time that the master may hold a poll before it answers that no stop is requested, in seconds."""
MIN_RETRY_DELAY = 0.25
MAX_RETRY_DELAY = 3.0
"""Seconds before a poll without an answer is repeated, doubled from the minimum to the maximum."""


class PreemptMode(enum.Enum):
    """Ranks that may call :meth:`PreemptContext.should_preempt`, and what they agree on."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    """All ranks call it in step, and all return True from the same call on."""
    ChiefOnly = "CHIEF_ONLY"
    """Only the chief may call it; the script passes the answer on to the workers."""
    WorkersAskMaster = "WORKERS_ASK_MASTER"
    """Any rank may call it; each returns True at its own next call after the request."""


class PreemptContext:
    """Decision when the script should save and exit.

    A bare run is preempted by SIGTERM, SIGINT, SIGHUP or SIGUSR1 to any one of its ranks, caught from the first
    :meth:`should_preempt` call on; workers of a DataLoader leave them to it. Under a master, only its request counts:
    a thread of the chief waits for it, or one of each rank in the mode WorkersAskMaster. The script of any rank may
    request a stop as well: :meth:`request`.

    ``core.init()`` creates one. Created by hand, from ``distributed`` alone, it is the agreement on :meth:`request` and
    nothing else: no signals, no master, no record. It is closed with ``distributed``, which has one at a time.

    Args:
        distributed: the ranks that decide together.
        preempt_mode: see :class:`PreemptMode`.
        acknowledge: tells the backend that this process stops because it was preempted.
        record: writes a record of a kind to the journal.
        master: backend that says when to stop.
        signals: whether signals preempt, where there is no master.
        grace: grace period in seconds, from a signal until this process may be killed; None if unknown.
        launched: whether a launcher passes its signals on to this process.

    Raises:
        RuntimeError: If ``distributed`` has one already.
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
        # Numbered: the last messages of a closed context may reach its successor on other ranks.
        self._topic = f"preempt {distributed.attach('PreemptContext', self.close)}"
        self._distributed = distributed
        self._communicator = distributed.communicator
        self._mode = preempt_mode
        self._acknowledge = acknowledge
        self._record = record
        self._side = RankState()
        self._chief: ChiefState | None = None
        self._never_called: set[int] = set()
        """On the chief: ranks whose first call is not known, for a warning."""
        if distributed.rank == 0:
            self._chief = ChiefState(range(distributed.size))
            if preempt_mode is PreemptMode.WorkersAskChief:
                self._never_called.update(range(1, distributed.size))
        self._signals: PreemptionSignals | None = None
        if signals and master is None:
            self._signals = PreemptionSignals(partial(self._request_stop, SIGNAL))
        self._asks_master = self._chief is not None or preempt_mode is PreemptMode.WorkersAskMaster
        self._master = master if self._asks_master else None
        self._grace = grace
        self._launched = launched
        self._poll: threading.Thread | None = None
        self._poll_failure: Exception | None = None
        self._closing = threading.Event()
        self._changed = threading.Event()
        self._requested_at: float | None = None
        self._first_call_at: float | None = None
        self._reason: str | None = None
        self._stopped_at = 0
        self._stop_seen_at: float | None = None
        """Time at which a call returned True for the current stop."""
        self._left = False
        self._acknowledged = False
        self._timed_out = False
        self._missing = "rank 0"
        """On a worker: ranks that an open decision waits for, for a warning."""
        if self._communicator is not None:
            self._communicator.subscribe(self._topic, self._on_message)
            self._communicator.on_abort(self._wake)

    def start(self) -> None:
        """Protect the workers of loaders, and begin to wait for a request of the master, until :meth:`close`."""
        protect_workers()
        if self._master is not None:
            poll = partial(self._poll_master, self._master)
            self._poll = threading.Thread(target=poll, name="det-core-preempt", daemon=True)
            self._poll.start()

    @property
    def acknowledged(self) -> bool:
        """Whether this process has acknowledged a preemption."""
        return self._acknowledged

    @property
    def requested_at(self) -> float | None:
        """Time at which this rank first learned of its preemption, on the monotonic clock, or None."""
        return self._requested_at

    @property
    def requested(self) -> bool:
        """Whether a stop is pending on this rank: requested, and not returned by a call yet; or a preemption.

        Reading it does not count as a call; it is for saving in the middle of an evaluation. Ranks learn of a request
        at different moments, so no collective may depend on it.
        """
        side = self._side
        return side.final or side.waiting or bool(side.stops)

    @property
    def reason(self) -> str | None:
        """Reason of the last True of :meth:`should_preempt`, equal on every rank, or None.

        ``"signal"``, ``"master"``, or the argument of :meth:`request`.
        """
        return self._reason

    @property
    def is_preemption(self) -> bool:
        """Whether :attr:`reason` is a preemption: not None, and not the script's own."""
        return self._reason in PREEMPTION_REASONS

    @property
    def stopped_by_script(self) -> bool:
        """Whether the last call returned True because of a :meth:`request` alone."""
        return 0 < self._stopped_at == self._side.calls

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether to save and exit now. Cheap enough for every batch.

        Args:
            auto_ack: acknowledge at once on the first True; else call :meth:`acknowledge_preemption_signal` before
                exiting, if the script complies.

        Returns:
            True from the agreed call on, on every rank alike in the mode ``WorkersAskChief``. If only the script
            requested the stop, True once: later calls return False until the next :meth:`request`.

        Raises:
            PeerLost: If a rank has died, so that this is not a preemption; nothing is acknowledged.
            CollectiveTimeout: If the ranks could not agree within ``DET_CORE_TIMEOUT``, where that is set.
            DetCoreError: If the thread that polls the master has failed, so that no later call would return True.
            RuntimeError: If called on a worker in the mode ``ChiefOnly``.
            ContextClosed: If the context is closed.
        """
        side = self._side
        side.calls += 1
        if not side.needs_slow_path:
            return False
        return self._should_preempt_slow(auto_ack)

    def request(self, reason: str = "") -> None:
        """Request a stop of the whole job: early stopping, NaN on one rank, a button. Any rank, any thread.

        All ranks return True from one agreed :meth:`should_preempt` call; this rank's next call waits until the ranks
        have agreed. Where they share a collective a step, that is at most two calls later. In the mode ChiefOnly it is
        the chief's next call, in WorkersAskMaster the next one of each rank.

        Such a stop is not acknowledged: a script that exits with status 0 after it is done, and is not started again.
        If a signal or the master requests a stop before the ranks have agreed, it is a preemption instead.

        Args:
            reason: value of :attr:`reason` on every rank.

        Raises:
            ValueError: If ``reason`` is one that stands for a preemption.
            ContextClosed: If the context is closed.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a string, not {type(reason).__name__}")
        if reason in PREEMPTION_REASONS:
            raise ValueError(f"reason={reason!r} is reserved for preemptions")
        if self._closing.is_set():
            raise ContextClosed("request() was called on a context that is closed")
        self._request_stop(reason)

    def acknowledge_preemption_signal(self) -> None:
        """Declare that this process stops unfinished because of a preemption, and expects to be run again."""
        if self._closing.is_set():
            raise ContextClosed("acknowledge_preemption_signal() was called on a context that is closed")
        if self._acknowledged:
            return
        self._record("preempt", {"acknowledged": True, "call": self._side.calls})
        self._acknowledge()
        self._acknowledged = True

    def close(self) -> None:
        """Finish an open agreement, send the others the final count of calls, and restore the handlers.

        Raises:
            DetCoreError: If the thread that polls the master has failed, and no call has raised that.
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
            self._apply(self._chief.decide(side.calls))
        self._await_decision()
        # Before any stop counts: a launcher's SIGTERM comes a tenth of a second after the death of a rank.
        self._distributed.check()
        self._raise_poll_failure()
        stop = side.pending_stop()
        # Off first, then on again: a request between the two lines must not be missed.
        side.needs_slow_path = False
        if side.waiting or side.stops or self._broken or self._poll_failure or self._check_never_called():
            side.needs_slow_path = True
        if stop is None:
            return False
        self._reason = stop.reason
        if stop.reason == SIGNAL and self._stop_seen_at is None:
            self._record_stop_seen()
        if self._stop_seen_at is None or not stop.is_preemption:
            self._stop_seen_at = _clock.monotonic()
        if not stop.is_preemption:
            self._stopped_at = side.calls
        elif auto_ack and self._asks_master:
            self.acknowledge_preemption_signal()
        return True

    def _record_stop_seen(self) -> None:
        """Record that this rank knows of the stop, and warn on the chief if that took longer than the grace period."""
        self._record("should_preempt", {"stopped": True})
        if self._chief is None or self._grace is None or self._requested_at is None:
            return
        waited = _clock.monotonic() - self._requested_at
        if waited > self._grace:
            logger.warning(
                "should_preempt() was called %.0f s after the signal to stop, and the grace period is %g s, after "
                "which a process is killed unsaved: call it after every batch, or set DET_CORE_GRACE",
                waited, self._grace,
            )  # fmt: skip

    def _begin(self) -> None:
        self._first_call_at = _clock.monotonic()
        if self._signals is not None:
            # A run that died without this record could not have saved on a signal: the next start explains that.
            self._record("should_preempt", {})
            if not self._signals.install():
                logger.warning(
                    "signals cannot preempt this run: the first should_preempt() call is not on the main thread; call "
                    "it there first"
                )
        if self._chief is None:
            self._post("began")

    def _check_never_called(self) -> bool:
        """Return whether the chief has to look for ranks that never call; after a while, warn of them once."""
        is_late = self._side.calls > 2 and _clock.monotonic() - (self._first_call_at or 0.0) > WARN_AFTER
        if is_late and (silent := sorted(tuple(self._never_called))):
            self._never_called.clear()
            logger.warning(
                "rank %s never called should_preempt(), so it will not stop with the others: every rank must call it, "
                "in step; if rank 0 alone is to call it: core.init(preempt_mode=core.PreemptMode.ChiefOnly)",
                ", ".join(map(str, silent)),
            )
        return bool(self._never_called)

    def _await_decision(self) -> None:
        """Wait while a decision is open and every rank lives; warn of ranks that do not respond.

        Raises:
            CollectiveTimeout: If the ranks did not agree within ``DET_CORE_TIMEOUT``.
        """
        side = self._side
        if self._communicator is None or not side.waiting:
            return
        waits = self._communicator.wait_loop(
            lambda: not side.waiting,
            lambda: f"should_preempt() call {side.calls}",
            lambda: self._unanswered() or self._missing,
            timeout=self._distributed.timeout,
            refresh=self._ask_missing,
            interval=POLL_INTERVAL,
        )
        try:
            for seconds in waits:
                if self._broken:
                    return
                if self._changed.wait(seconds):
                    self._changed.clear()
        except CollectiveTimeout:
            self._timed_out = True
            raise

    def _ask_missing(self) -> None:
        if self._chief is None:
            self._post("who")

    def _unanswered(self) -> str:
        """Return the ranks that an open decision waits for, on the chief."""
        if self._chief is None or self._communicator is None:
            return ""
        last_call = self._communicator.last_call
        return ", ".join(f"rank {rank} (last call: {last_call(rank)})" for rank in sorted(self._chief.unanswered))

    # Requests. _request_stop() runs in a signal handler, in the thread that polls the master, or in one of the
    # script's; all else on the ipc thread, or, without one, in the next call.

    def _request_stop(self, reason: str) -> None:
        if reason in PREEMPTION_REASONS and self._requested_at is None:
            self._requested_at = _clock.monotonic()
            if reason == SIGNAL:
                # The only trace of the signal, should the process be killed before its next call.
                self._record("preempt_request", {})
        side = self._side
        communicator = self._communicator
        round_ = side.round
        if communicator is None:
            self._forward_request(reason, round_)
            side.request()
            return
        # In the mode ChiefOnly a worker makes no calls that could wait.
        if self._chief is not None or self._mode is not PreemptMode.ChiefOnly:
            side.request()
        communicator.call_soon(lambda: self._forward_request(reason, round_))

    def _forward_request(self, reason: str, round_: int) -> None:
        """Bring a request to the chief; there, open a round for it."""
        chief = self._chief
        if chief is None:
            self._post("request", round_, reason)
            return
        if self._left:
            return
        if self._mode is PreemptMode.ChiefOnly:
            round_ = self._side.round  # the chief alone makes calls, so its round counts
        to_ask = chief.on_request(reason, round_)
        if self._communicator is None:
            return  # the next call decides
        if self._mode is not PreemptMode.WorkersAskChief:
            self._apply(chief.decide(0))  # at the next call of each rank, even at one that waits already
            return
        for rank in sorted(to_ask):
            if rank:
                self._post("ask", to=rank)
            else:
                self._apply(chief.on_answer(0, self._side.on_ask()))

    def _on_message(self, rank: int, message: tuple[str, int, str]) -> None:
        """Handle a message of ``rank``: from a worker to the chief, or from the chief to a worker."""
        word, number, text = message
        chief = self._chief
        if chief is not None:
            match word:
                case "began":
                    self._never_called.discard(rank)
                case "request":
                    self._forward_request(text, number)
                case "count":
                    self._apply(chief.on_answer(rank, number))
                case "left":
                    self._apply(chief.on_leave(rank, number))
                case "who":
                    self._post("missing", text=self._unanswered(), to=rank)
            return
        match word:
            case "ask":
                self._post("count", self._side.on_ask())
            case "stop":
                self._apply(Stop(number, text))
            case "missing":
                self._missing = text or self._missing
            case "left":
                self._side.chief_left = True
                self._changed.set()

    def _apply(self, stop: Stop | None) -> None:
        """Apply a decided stop, if any; on the chief, send it to the other ranks."""
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
        # Read from the communicator: a collective of the main thread may raise before _wake() is called.
        return self._communicator is not None and self._communicator.abort_reason is not None

    def _wake(self) -> None:
        self._side.needs_slow_path = True
        self._changed.set()

    def _send_final_count(self) -> None:
        """Finish an open agreement, and send the others the number of calls made here."""
        communicator = self._communicator
        if communicator is None or self._broken:  # nobody agrees any more; or this is a forked child
            return
        sent = threading.Event()

        def leave() -> None:
            self._left = True
            self._post("left", self._side.calls)
            if self._chief is not None:
                self._apply(self._chief.on_leave(0, self._side.calls))
            sent.set()

        try:
            if not self._timed_out:
                self._await_decision()
        finally:
            communicator.call_soon(leave)
            sent.wait(CLOSE_TIMEOUT)

    # The master

    def _poll_master(self, master: Backend) -> None:
        """Poll the master, in a thread, until it requests a stop. Retry without an answer; keep other errors."""
        jitter = SystemRandom()  # the script owns the global generator: one draw would change its training
        hold = 0.0  # the first poll is answered at once, which shows whether there are answers
        delay = MIN_RETRY_DELAY
        warned = False
        while not self._closing.is_set():
            try:
                if master.preempted(hold):
                    return self._request_stop(MASTER)
                hold = LONG_POLL_TIMEOUT
                delay = MIN_RETRY_DELAY
                warned = False
            except Exception as e:
                if self._closing.is_set():
                    return
                if not isinstance(e, DetCoreError):
                    self._poll_failure = e
                    return self._wake()
                level = logging.DEBUG if warned else logging.WARNING
                logger.log(level, "cannot ask the master whether to stop, retrying: %s", e)
                warned = True
                # Spread out: the trials of a master that comes back would all ask at the same moment.
                self._closing.wait(delay * jitter.uniform(0.5, 1.0))
                delay = min(2 * delay, MAX_RETRY_DELAY)

    def _raise_poll_failure(self) -> None:
        failure = self._poll_failure
        self._poll_failure = None
        if failure is not None:
            raise DetCoreError(
                f"preemption polling failed, so this trial cannot be preempted: {type(failure).__name__}: {failure}"
            ) from failure
