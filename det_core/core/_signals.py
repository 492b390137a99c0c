"""Signals as preemption requests, for a run without a master."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
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
        self._pid = os.getpid()
        self._interrupts = 0

    def install(self) -> bool:
        """Install the handlers. False when this is not the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in PREEMPTION_SIGNALS:
            previous = signal.getsignal(number)
            if previous is None or previous is signal.SIG_IGN:
                continue
            self._previous[number] = previous
            signal.signal(number, self._handle)
        return True

    def restore(self) -> None:
        """Put back what stood before, where nobody has replaced our handler since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_forked_child(number)
            return
        self._on_signal()
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        elif number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            os.write(2, _FIRST_INTERRUPT)

    def _handle_in_forked_child(self, number: int) -> None:
        """A DataLoader worker inherits the handlers: it leaves Ctrl-C to its parent, which saves first, and dies of
        the others as it would have without us."""
        if number == signal.SIGINT:
            return
        signal.signal(number, self._previous.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)
