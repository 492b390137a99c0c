"""Who writes a staging folder, told by the folder's name, so that what a dead writer left can be removed."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = 0
"""The start time of a process that lives, but that /proc hides."""


@dataclass(frozen=True)
class Owner:
    """A writer: a process of one restart of a run.

    ``host`` stands for one boot of one kernel and one name space of process ids, so that containers and machines
    cloned from one image are told apart.
    """

    run: str
    restart: int
    host: str
    pid: int
    started: int

    @classmethod
    def current(cls, run_id: str, restart: int) -> Owner:
        """This process."""
        return _current(run_id, restart, os.getpid())

    @property
    def tag(self) -> str:
        """The owner as the end of a folder's name."""
        return f"{self.run}.{self.restart}.{self.host}.{self.pid}.{self.started}"

    @classmethod
    def parse(cls, name: str) -> tuple[str, Owner] | None:
        """Split ``<storage_id>.<tag>``; None if it is no such name."""
        parts = name.rsplit(".", 5)
        if len(parts) != 6 or not all(p.isdigit() for p in (parts[2], parts[4], parts[5])):
            return None
        storage_id, run, restart, host, pid, started = parts
        return storage_id, cls(run, int(restart), host, int(pid), int(started))

    def is_here(self) -> bool:
        """Whether it is a process of this host, so that :meth:`is_dead` knows for sure."""
        return self.host == host_identity()

    def is_dead(self, heir: Owner | None = None) -> bool:
        """Whether this writer can never go on: its process is gone, or ``heir`` is a later restart of its run."""
        if heir is not None and self.run == heir.run and self.restart < heir.restart:
            return True
        if not self.is_here():
            return False
        found = _start_time(self.pid)
        return found is None or found not in (UNKNOWN, self.started)


@functools.lru_cache(maxsize=16)
def _current(run_id: str, restart: int, pid: int) -> Owner:
    """A process is asked for itself at every checkpoint."""
    return Owner(_short(run_id), restart, host_identity(), pid, _own_start(pid))


def _short(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def host_identity() -> str:
    """What tells this machine (rather: this boot of a kernel, and name space of processes) from any other."""
    return _host_identity(os.getpid())


@functools.lru_cache(maxsize=1)
def _host_identity(_pid: int) -> str:
    """Looked up once a process; a child may be in another name space."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return _short(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}")
    except OSError:
        return _short(f"{os.uname().nodename} without /proc")


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, to tell it from a later one of its pid; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return UNKNOWN if _is_alive(pid) else None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@functools.lru_cache(maxsize=1)
def _own_start(pid: int) -> int:
    """When this process started; looked up once a process."""
    return _start_time(pid) or UNKNOWN


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
