"""Signals as preemption requests, for a run without a master."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from det_core import _clock

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SHIELD_SECONDS = 30.0
"""How long after a rank's loss, or after an agreed stop, a SIGTERM is taken to belong to it."""
_FIRST_INTERRUPT = b"\nstopping at the next should_preempt(); Ctrl-C again to interrupt now\n"


class SignalWatch:
    """Calls ``on_signal()`` from the handler of SIGTERM, SIGUSR1 and SIGINT, until :meth:`restore`.

    A handler written in Python that stood before is called as well; the default ones are not. A signal that the process
    was started to ignore (``nohup``) stays ignored. The second SIGINT raises KeyboardInterrupt.

    Args:
        on_signal: must be safe inside a signal handler: no locks, no blocking.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._previous: dict[int, Any] = {}
        self._received: set[int] = set()
        self._interrupts = 0
        self._forked = False

    def install(self) -> bool:
        """Install the handlers. False when this is not the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in PREEMPTION_SIGNALS:
            previous = signal.getsignal(number)
            if isinstance(previous, _Shield):
                previous = previous.previous
            if previous is None or previous is signal.SIG_IGN:
                continue
            self._previous[number] = previous
            signal.signal(number, self._handle)
        _INSTALLED.add(self)
        return True

    def restore(self, *, term_may_follow: bool = False) -> None:
        """Put back what stood before, where nobody has replaced our handler since.

        Args:
            term_may_follow: let one SIGTERM pass, if none has come yet. It may follow the loss of a rank, which this
                one is about to report, or a stop that the ranks have agreed on, of which every rank gets its own.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        _INSTALLED.discard(self)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                shield = term_may_follow and number == signal.SIGTERM and number not in self._received
                signal.signal(number, _Shield(number, previous) if shield else previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._forked:
            return
        self._received.add(number)
        self._on_signal()
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        elif number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            os.write(2, _FIRST_INTERRUPT)

    def after_fork(self) -> None:
        """In a forked child, such as a DataLoader worker: leave Ctrl-C to the parent, which saves first, and die of the
        other signals as without us."""
        self._forked = True
        for number, previous in self._previous.items():
            if number != signal.SIGINT:
                signal.signal(number, previous)


class _Shield:
    """A handler that puts ``previous`` back and lets one signal pass, for :data:`SHIELD_SECONDS`."""

    def __init__(self, number: int, previous: Any) -> None:
        self.previous = previous
        self._number = number
        self._until = _clock.monotonic() + SHIELD_SECONDS
        atexit.register(self._at_exit)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self.previous)
        atexit.unregister(self._at_exit)
        if _clock.monotonic() > self._until:
            os.kill(os.getpid(), number)

    def _at_exit(self) -> None:
        """An interpreter that ends lets go of its handlers some time before the process is gone."""
        installed: Any = signal.getsignal(self._number)
        if installed is self and _clock.monotonic() < self._until:
            signal.signal(self._number, signal.SIG_IGN)


_INSTALLED: weakref.WeakSet[SignalWatch] = weakref.WeakSet()
_MASKS = threading.local()


def _before_fork() -> None:
    """Hold signals back: Python drops those that reach a child before its handlers are set right."""
    _MASKS.old = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS) if _INSTALLED else None


def _after_fork_in_parent() -> None:
    if _MASKS.old is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _MASKS.old)


def _after_fork_in_child() -> None:
    for watch in list(_INSTALLED):
        watch.after_fork()
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
