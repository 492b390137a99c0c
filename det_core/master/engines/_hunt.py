"""Ending the processes of an allocation whose supervisor was killed, guardian and all.

They are known by a variable that they were born with, by their session, or by descent from one that is.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._supervisor._end import boot
from det_core.master.engines._supervisor._tree import below, processes, send, session, start_time

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


def kill_recorded(folder: AllocationFolder, name: str) -> bool:
    """Kill the guardian or the worker of an allocation, if it still is the process that was written down."""
    known = folder.processes()
    pid, started = known.get(name, (0, None))
    if not pid or known.get("boot") != boot() or start_time(pid) != started:
        return False
    send(pid, signal.SIGCONT)
    return send(pid, signal.SIGKILL)


def _left(folder: AllocationFolder) -> set[int]:
    mark = f"DET_CORE_INFO_DIR={folder.path / 'info'}".encode()
    known = folder.processes()
    script, started = known.get("script", (0, None))
    same = known.get("boot") == boot() and start_time(script) in (None, started)
    parents = processes()
    ours = {pid for pid in parents if _is_ours(pid, mark, script if same else 0)}
    found = ours | below(ours, parents)
    return {pid for pid in found if pid != os.getpid() and start_time(pid) is not None}


def _is_ours(pid: int, mark: bytes, of_session: int) -> bool:
    if of_session and session(pid) == of_session:
        return True
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
