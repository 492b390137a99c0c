"""The processes of a home folder: its master, the supervisors of its trials, and what they run."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(folder: Path) -> list[str]:
    """Those that name a folder, or one below it, in their command line or as their ``DET_CORE_HOME``; not this one."""
    found = []
    inside, variable = str(folder).encode(), f"DET_CORE_HOME={folder}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", pid, "cmdline").read_bytes()
            variables = Path("/proc", pid, "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        if int(pid) != os.getpid() and (inside in command or variable in variables):
            found.append(f"{pid} ({command.replace(bytes(1), b' ').decode(errors='replace').strip()})")
    return found
