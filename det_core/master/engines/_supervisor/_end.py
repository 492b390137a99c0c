"""Writing down who runs, and how it ended."""

from __future__ import annotations

import json
import os

from ._tree import start_time

EXIT, PROCESSES = "exit.json", "processes"


def write_processes(folder: str, **pids: int) -> None:
    """Say who runs, each with the moment it started, by which it is told from a later process of that number."""
    found: dict[str, object] = {name: [pid, start_time(pid)] for name, pid in pids.items()}
    _replace(folder, PROCESSES, json.dumps({"boot": boot(), **found}).encode(), durable=False)


def boot() -> str:
    """What tells this start of the machine from others."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def write_end(folder: str, facts: dict[str, object]) -> None:
    """Say how it ended, durably; whole or not at all."""
    _replace(folder, EXIT, json.dumps(facts).encode(), durable=True)


def _replace(folder: str, name: str, data: bytes, *, durable: bool) -> None:
    path = os.path.join(folder, name)
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(path + ".new", path)
    if durable:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(at)
        finally:
            os.close(at)
