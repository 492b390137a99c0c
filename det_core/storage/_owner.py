"""Who writes, deletes or reads a checkpoint, told by a mark's name, so that what the dead leave can be removed."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from det_core._standalone.processes import start_time

READ_LEASE_PREFIX = "held."
"""How a reader's mark begins: ``held.<storage_id>.<owner tag>.<random>``."""
LEASE_TTL = 24 * 3600.0
"""Seconds for which the mark of a process on another host, of whom nobody knows whether it lives, counts."""
UNKNOWN_START_TIME = 0
"""The start time of a process that lives, but that /proc hides."""


@dataclass(frozen=True)
class Owner:
    """A process of one restart of a run.

    ``host`` stands for one boot of one kernel and one name space of process ids, so that containers and machines
    cloned from one image are told apart. ``started`` tells a process from a later one that got its pid.
    """

    run: str
    restart: int
    host: str
    pid: int
    started: int

    @classmethod
    def current(cls, run_id: str = "", restart: int = 0) -> Owner:
        """This process."""
        host, started = _process(pid := os.getpid())
        return cls(_short_hash(run_id), restart, host, pid, started)

    @property
    def tag(self) -> str:
        """The owner as the end of a mark's name."""
        return f"{self.run}.{self.restart}.{self.host}.{self.pid}.{self.started}"

    @classmethod
    def parse(cls, name: str) -> tuple[str, Owner] | None:
        """Split ``<storage_id>.<tag>``; None if it is no such name. A storage_id may hold dots."""
        parts = name.rsplit(".", 5)
        if len(parts) != 6 or not all(p.isdigit() for p in (parts[2], parts[4], parts[5])):
            return None
        storage_id, run, restart, host, pid, started = parts
        return storage_id, cls(run, int(restart), host, int(pid), int(started))

    def is_here(self) -> bool:
        """Whether it is a process of this host, so that :meth:`is_dead` knows for sure."""
        return self.host == host_id()

    def is_dead(self, successor: Owner | None = None) -> bool:
        """Whether it can never go on: its process is gone, or ``successor`` is a later restart of its run, wherever."""
        if successor is not None and self.run == successor.run and self.restart < successor.restart:
            return True
        if not self.is_here():
            return False
        found = _start_time(self.pid)
        return found is None or found not in (UNKNOWN_START_TIME, self.started)

    def is_valid(self, age: float, successor: Owner | None = None) -> bool:
        """Whether a mark of this owner, touched ``age`` seconds ago, still stands for something."""
        return not self.is_dead(successor) and (self.is_here() or age < LEASE_TTL)


def parse_read_lease(name: str) -> tuple[str, Owner] | None:
    """The checkpoint that a reader's mark of this name holds, and for whom; None: it is no such mark."""
    return (
        Owner.parse(name[len(READ_LEASE_PREFIX) :].rpartition(".")[0]) if name.startswith(READ_LEASE_PREFIX) else None
    )


def _short_hash(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def host_id() -> str:
    """What tells this machine (rather: this boot of a kernel, and name space of processes) from any other."""
    return _process(os.getpid())[0]


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> tuple[str, int]:
    """Host and start time of this process, looked up once; a child may be in another name space."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        host = f"{os.uname().nodename} without /proc"
    return _short_hash(host), _start_time(pid) or UNKNOWN_START_TIME


def _start_time(pid: int) -> int | None:
    """Return the start time of a process, UNKNOWN_START_TIME if /proc hides it, or None if it does not run."""
    started = start_time(pid)
    if started is not None or os.path.exists(f"/proc/{pid}/stat"):  # a zombie has an entry, but does not run
        return started
    try:
        os.kill(pid, 0)  # /proc is not mounted, or hides the processes of other users (hidepid)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return UNKNOWN_START_TIME
