"""The processes of a home folder: its master, the supervisors of its trials, and what they run."""

from __future__ import annotations

import os
import re
from pathlib import Path

from support.servers import MARK


def processes_of(folder: Path) -> list[str]:
    """Return the processes that name a directory, or one below it, as an argument or their ``DET_CORE_HOME``.

    This one and its ancestors aside, whose command lines may say where tests are to write.
    """
    found, mine = [], _and_ancestors(os.getpid())
    inside = re.compile(re.escape(str(folder).encode()) + rb"(?![\w.-])")  # and no folder whose name only begins so
    homes = b"DET_CORE_HOME=" + str(folder).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", pid, "cmdline").read_bytes()
            variables = Path("/proc", pid, "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        if int(pid) not in mine and (inside.search(command) or _lives_in(homes, variables)):
            found.append(f"{pid} ({command.replace(bytes(1), b' ').decode(errors='replace').strip()})")
    return found


def _lives_in(homes: bytes, variables: list[bytes]) -> bool:
    """Return whether the home directory is there; False for a server of all tests, which the first user starts."""
    below = homes + b"/"
    return f"{MARK}=1".encode() not in variables and any(v == homes or v.startswith(below) for v in variables)


def _and_ancestors(pid: int) -> set[int]:
    found = set()
    while pid:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found
