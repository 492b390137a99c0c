"""The processes of a session, which a framework's program and all that it starts on a machine share."""

from __future__ import annotations

import contextlib
import os
import signal
import time


def members(session: int) -> list[int]:
    """Its processes that run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, _, _, leader = file.read().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(leader) == session and state not in "ZX":
            found.append(int(pid))
    return found


def kill_the_others() -> None:
    """Kill all other processes of this one's session, also those that they start meanwhile."""
    for _ in range(50):
        others = [pid for pid in members(os.getsid(0)) if pid != os.getpid()]
        if not others:
            return
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
