"""Signal handlers: stop requests in bare runs, a flush before SIGTERM ends a process under a master.

Both put back the previous handlers. Handlers run between two bytecodes of the main thread, which may hold any lock:
they take none.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from det_core import _clock
from det_core._forks import ForkGuard
from det_core._notices import write_in_handler
from det_core._standalone.stop_signals import SAME_INTERRUPT, STOP_SIGNALS, is_worker_loss

LATE_SIGNAL_WINDOW = 30.0
"""Seconds after an agreed stop, or a rank's loss, in which further signals are attributed to it and ignored."""
SIGTERM_FLUSH_TIMEOUT = 5.0
"""Maximum delay of a SIGTERM under a master until the reports are safe, in seconds. A second one is not delayed."""
_FIRST_INTERRUPT = "\nstopping at the next should_preempt(); Ctrl-C again to interrupt now\n"


class PreemptionSignals:
    """Handlers that call ``on_signal()`` for each stop signal, between install and restore.

    A previous handler written in Python is called as well; the default ones are not. A signal that the process was
    started to ignore (``nohup``) stays ignored. A second SIGINT, a second later, raises KeyboardInterrupt.

    From the first signal on, the death of a DataLoader's worker raises from the loader alone: torch raises it from a
    SIGCHLD handler, which would interrupt a save, or leave an update half applied.

    Args:
        on_signal: safe inside a signal handler: no locks, no blocking.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._previous: dict[int, Any] = {}
        self._previous_sigchld: Any = None
        self._interrupted_at: float | None = None
        self._is_forked = False
        self._ignore_signals_until: float | None = None
        """Set by :meth:`restore`: until then the handlers that still stand ignore signals."""
        self._remaining: dict[int, int] = {}
        """Number of signals of each kind that are still to be ignored after :meth:`restore`."""

    def install(self) -> bool:
        """Install the handlers, and return whether this is the main thread; Python allows none in others."""
        if not _on_main_thread():
            return False
        for number in STOP_SIGNALS:
            previous = signal.getsignal(number)
            owner = getattr(previous, "__self__", None)
            if isinstance(owner, PreemptionSignals) and owner._ignore_signals_until is not None:
                # A handler of a closed context is about to give way: what it would put back is what counts.
                previous = owner._previous.get(number, signal.SIG_DFL)
                atexit.unregister(owner._ignore_at_exit)
            if previous is not None and previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._handle)
        _installed.add(self)
        return True

    def restore(self, *, ignored: int = 0) -> None:
        """Put back the previous handlers, except where ours was replaced since.

        Args:
            ignored: number of further signals of each kind to ignore where they would end the process.
        """
        if not _on_main_thread():
            # Python restores none outside of the main thread: each handler gives way to the first signal it gets.
            self._ignore_signals_until = 0.0
            return
        _installed.discard(self)
        if signal.getsignal(signal.SIGCHLD) == self._handle_sigchld:
            signal.signal(signal.SIGCHLD, self._previous_sigchld)
        replaced = self._previous
        self._previous = {}
        for number, previous in replaced.items():
            if signal.getsignal(number) != self._handle:
                continue
            if ignored and previous in (signal.SIG_DFL, signal.default_int_handler):
                self._previous[number] = previous
                self._remaining[number] = ignored
            else:
                signal.signal(number, previous)
        if self._previous:
            self._ignore_signals_until = _clock.monotonic() + LATE_SIGNAL_WINDOW
            _installed.add(self)
            atexit.register(self._ignore_at_exit)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_forked:
            return
        if self._ignore_signals_until is not None:
            is_late = _clock.monotonic() > self._ignore_signals_until
            self._remaining[number] = self._remaining.get(number, 1) - 1
            if is_late or not self._remaining[number]:
                signal.signal(number, self._previous.get(number, signal.SIG_DFL))
            if is_late:
                os.kill(os.getpid(), number)  # again, for the previous handler: it is not one of the stop before
            return
        self._take_sigchld()
        self._on_signal()
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        elif number == signal.SIGINT:
            if self._interrupted_at is not None:
                # A launcher passes on the SIGINT that the terminal has sent to this process, too: one Ctrl-C.
                if _clock.monotonic() - self._interrupted_at > SAME_INTERRUPT:
                    raise KeyboardInterrupt
                return
            self._interrupted_at = _clock.monotonic()
            write_in_handler(_FIRST_INTERRUPT)

    def _take_sigchld(self) -> None:
        previous = signal.getsignal(signal.SIGCHLD)
        if callable(previous) and previous != self._handle_sigchld:
            self._previous_sigchld = previous
            signal.signal(signal.SIGCHLD, self._handle_sigchld)

    def _handle_sigchld(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous_sigchld(number, frame)
        except RuntimeError as e:
            if not is_worker_loss(e):
                raise

    def _ignore_at_exit(self) -> None:
        # An interpreter that ends lets go of its handlers some time before the process is gone.
        for number in self._previous:
            if signal.getsignal(number) == self._handle and _clock.monotonic() < (self._ignore_signals_until or 0.0):
                signal.signal(number, signal.SIG_IGN)

    def after_fork(self) -> None:
        """Give up the handlers in a forked child, such as a DataLoader worker."""
        self._is_forked = True
        # Ctrl-C reaches the child, too, and is left to the parent, which saves first.
        for number, previous in self._previous.items():
            if number != signal.SIGINT and signal.getsignal(number) == self._handle:
                signal.signal(number, previous)


class FlushOnSigterm:
    """Handler of SIGTERM that calls ``flush()`` in a thread, and then lets the signal end the process.

    Installed only in place of the default; a handler that the script installs replaces it.

    Args:
        flush: makes the reports safe, within :data:`SIGTERM_FLUSH_TIMEOUT`.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._pid = os.getpid()
        if _on_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    def restore(self) -> None:
        """Put back the default, unless our handler was replaced."""
        if _on_main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if self._pid != os.getpid():  # a forked child, such as a DataLoader worker, has nothing to flush
            os.kill(os.getpid(), number)
            return
        # In threads, as the main one may hold the journal's lock at this moment.
        threading.Thread(target=self._end, args=(number,), name="det-core-term-end", daemon=True).start()

    def _end(self, number: int) -> None:
        work = threading.Thread(target=self._flush_and_report, name="det-core-term", daemon=True)
        work.start()
        work.join(SIGTERM_FLUSH_TIMEOUT)
        os.kill(os.getpid(), number)

    def _flush_and_report(self) -> None:
        try:
            self._flush()
        except Exception as e:
            write_in_handler(f"det_core: at the end of this process: {type(e).__name__}: {e}\n")


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_installed = ForkGuard(PreemptionSignals.after_fork)
_masks = threading.local()


def _before_fork() -> None:
    # Blocked until the child's handlers are right: Python drops signals that reach a child before.
    _masks.old = None
    if _installed:
        _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after_fork() -> None:
    if _masks.old is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.old)


# After the guard above, so that in a child the handlers are right by then.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
