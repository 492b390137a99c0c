"""Ending the processes of an allocation whose supervisor was killed.

They are known by a variable that they were born with, by their session, or by descent from one that is.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from det_core._standalone.processes import descendants, send, start_time
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._supervisor._program import boot_id

_PATIENCE = 10.0


def hunt(folder: AllocationFolder) -> int:
    """Kill what is left, until nothing is.

    Returns:
        How many processes there were.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE
    while (found := _left(folder)) and time.monotonic() < deadline:
        for pid in found:
            if send(pid, signal.SIGKILL):
                killed.add(pid)
        time.sleep(0.005)
    return len(killed)


def kill_supervisor(folder: AllocationFolder) -> None:
    """Kill the supervisor of an allocation, if it still is the process that was written down."""
    known = folder.processes()
    pid, started = known.get("supervisor", (0, None))
    if pid and known.get("boot") == boot_id() and start_time(pid) == started:
        send(pid, signal.SIGCONT)
        send(pid, signal.SIGKILL)


def _left(folder: AllocationFolder) -> set[int]:
    mark = f"DET_CORE_INFO_DIR={folder.path / 'info'}".encode()
    known = folder.processes()
    script, started = known.get("script", (0, None))
    same = known.get("boot") == boot_id() and start_time(script) in (None, started)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    ours = {pid for pid in pids if _is_ours(pid, mark, script if same else 0)}
    found = ours | descendants(ours)
    return {pid for pid in found if pid != os.getpid() and start_time(pid) is not None}


def _is_ours(pid: int, mark: bytes, of_session: int) -> bool:
    try:
        if of_session and os.getsid(pid) == of_session:
            return True
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
