"""Leases: which process writes, deletes or reads a checkpoint, so that files of dead processes can be collected.

A lease is an entry in a store's staging directory; its name says whose it is.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from det_core._standalone.processes import start_time

READ_LEASE_PREFIX = "held."
"""Prefix of a reader's lease: ``held.<storage_id>.<owner tag>.<random>``."""
LEASE_TTL = 24 * 3600.0
"""Seconds after its last renewal for which a lease of another host is valid, as nobody can check that process."""
UNKNOWN_START_TIME = 0
"""Start time of a live process that /proc hides."""


@dataclass(frozen=True)
class Owner:
    """A process of one restart of a run.

    ``host`` identifies one boot of one kernel and one namespace of process IDs, so that containers, and machines cloned
    from one image, differ. ``started`` distinguishes a process from a later one with the same ID.
    """

    run: str
    restart: int
    host: str
    pid: int
    started: int

    @classmethod
    def current(cls, run_id: str = "", restart: int = 0) -> Owner:
        """Return the owner that stands for this process."""
        pid = os.getpid()
        host, started = _process(pid)
        return cls(_short_hash(run_id), restart, host, pid, started)

    @property
    def tag(self) -> str:
        """The owner as the end of a lease's name."""
        return f"{self.run}.{self.restart}.{self.host}.{self.pid}.{self.started}"

    @classmethod
    def parse(cls, name: str) -> tuple[str, Owner] | None:
        """Split ``<storage_id>.<tag>``, or return None for any other name. A storage ID may contain dots."""
        parts = name.rsplit(".", 5)
        if len(parts) != 6 or not all(p.isdigit() for p in (parts[2], parts[4], parts[5])):
            return None
        storage_id, run, restart, host, pid, started = parts
        return storage_id, cls(run, int(restart), host, int(pid), int(started))

    def is_here(self) -> bool:
        """Return whether it is a process of this host, so that :meth:`is_dead` is certain."""
        return self.host == host_id()

    def is_dead(self, successor: Owner | None = None) -> bool:
        """Return whether its process has ended, or ``successor``, on any host, is a later restart of its run."""
        if successor is not None and self.run == successor.run and self.restart < successor.restart:
            return True
        if not self.is_here():
            return False
        started = _start_time(self.pid)
        return started is None or started not in (UNKNOWN_START_TIME, self.started)

    def is_valid(self, age: float, successor: Owner | None = None) -> bool:
        """Return whether a lease that was renewed ``age`` seconds ago is valid."""
        return not self.is_dead(successor) and (self.is_here() or age < LEASE_TTL)


def parse_read_lease(name: str) -> tuple[str, Owner] | None:
    """Return the checkpoint and the owner of a reader's lease, or None for any other name."""
    return (
        Owner.parse(name[len(READ_LEASE_PREFIX) :].rpartition(".")[0]) if name.startswith(READ_LEASE_PREFIX) else None
    )


def _short_hash(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def host_id() -> str:
    """Return the identity of this host: this boot of its kernel and this namespace of process IDs."""
    return _process(os.getpid())[0]


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> tuple[str, int]:
    """Return host and start time of this process. Cached by process ID, as a child may be in another namespace."""
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
