"""Signals to the launcher, as bytes that its loop reads."""

from __future__ import annotations

import os
import signal

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a job to end: after them the grace runs."""
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are for the scripts. The last two mean what a script makes them mean, so no grace runs after them."""


class Signals:
    """Catches :data:`PASSED_ON` and SIGCHLD from construction to :meth:`close`.

    What the launcher was started to ignore (``nohup``, a shell's ``&``) stays ignored.
    """

    def __init__(self) -> None:
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._wake, False)
        self._before = {s: signal.getsignal(s) for s in (*PASSED_ON, signal.SIGCHLD)}
        self._wakeup_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for signum, handler in self._before.items():
            if handler != signal.SIG_IGN or signum == signal.SIGCHLD:
                signal.signal(signum, _heard)

    def read(self) -> list[int]:
        """The signals that have come since the last call, in order."""
        try:
            return list(os.read(self.fd, 4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Put back what was there before."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._wake)


def name(signum: int) -> str:
    """``SIGTERM`` and the like; the number where it has no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _heard(signum: int, frame: object) -> None:
    """Does nothing: the signal's number arrives through the wakeup descriptor."""
