"""Finding processes, and ending every one below this one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if there is none, or only its remains."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def processes() -> dict[int, int]:
    """The parent of every process there is."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            found[int(name)] = int(fields[1])
    return found


def session(pid: int) -> int | None:
    """The session of a process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[3])


def below(roots: Iterable[int], parents: dict[int, int]) -> set[int]:
    """All descendants of ``roots``."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def end_all() -> None:
    """Kill every process below this one, which adopts orphans, until there is none.

    What runs as another user (sudo) cannot be killed: it is given up after a while.
    """
    pause, give_up = 0.001, time.monotonic() + 10
    while _reap():
        sent = [send(pid, signal.SIGKILL) for pid in below([os.getpid()], processes())]
        if not any(sent) and time.monotonic() > give_up:
            return
        if _reap():
            time.sleep(pause)
            pause = min(pause * 2, 0.1)


def send(pid: int, signum: int) -> bool:
    """Send a signal; False if there is no such process, or it belongs to another user."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap() -> bool:
    """Collect children that have ended; False once there is no child."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, …"""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, 4096).rpartition(b") ")[2].decode().split()
    except OSError:
        return None
    finally:
        os.close(fd)
