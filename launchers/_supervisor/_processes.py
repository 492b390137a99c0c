"""Ending processes that may already have ended."""

from __future__ import annotations

import os
import signal
import time

from .._wrapper._session import members


def kill(pid: int, signum: int) -> None:
    """Send ``signum`` to the process ``pid``, if there is one; 0 is none."""
    if pid:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return


def kill_group(leader: int) -> None:
    """Kill the process group of ``leader``, if there is one; 0 is none."""
    if leader:
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return


def end_session(leader: int, seconds: float = 5) -> None:
    """End what is left of the session of ``leader``, and return when nothing of it runs, or after ``seconds``.

    It is told at first, as some of it has things of its own to remove, and killed half a second later.
    """
    began = time.monotonic()
    told: set[int] = set()
    while (left := members(leader)) and time.monotonic() < began + seconds:
        late = time.monotonic() > began + 0.5
        for pid in left if late else set(left) - told:
            kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told.update(left)
        time.sleep(0.02)
