"""Is the process at the other end still alive, and how long does one wait for it?

On one machine a peer is watched by pidfd, which becomes readable when the process is dead, whatever it was doing and
whoever inherited its sockets. Where the kernel refuses one, the control socket alone is watched: it is closed in
forked children, so its end is the end of the process too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from det_core._clock import monotonic

logger = logging.getLogger("det_core.ipc")
WARN_AFTER = (60.0, 600.0, 3600.0)
"""Seconds of waiting after which a warning says for whom."""


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when process ``pid`` dies; None where there is no such thing."""
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


class Patience:
    """The waiting rule: wait as long as everybody lives, warn after 1, 10 and 60 minutes, raise only at a deadline.

    Args:
        timeout: seconds until ``expired``; None: never.
        describe: what is waited for and whose turn it is, for the warning.
    """

    def __init__(self, timeout: float | None, describe: Callable[[], str]) -> None:
        self._began = monotonic()
        self._timeout = timeout
        self._describe = describe
        self._warnings = list(WARN_AFTER)

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return monotonic() - self._began

    @property
    def expired(self) -> bool:
        """Whether the deadline, if one is set, has passed."""
        return self._timeout is not None and self.waited >= self._timeout

    def next(self, at_most: float) -> float:
        """Warn if it is time to; the seconds to sleep until something is due here."""
        waited = self.waited
        while self._warnings and waited >= self._warnings[0]:
            minutes = self._warnings.pop(0) / 60
            logger.warning("waiting for %g min: %s", minutes, self._describe())
        due = [at_most]
        if self._warnings:
            due.append(self._warnings[0] - waited)
        if self._timeout is not None:
            due.append(self._timeout - waited)
        return max(0.0, min(due))
