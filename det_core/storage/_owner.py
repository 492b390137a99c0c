"""Who writes, deletes or reads a checkpoint, told by a mark's name, so that what the dead leave can be removed."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

HELD = "held."
"""How a reader's mark begins: ``held.<storage_id>.<owner tag>.<random>``."""
BELIEVED = 24 * 3600.0
"""Seconds for which the mark of a process on another host, of whom nobody knows whether it lives, counts."""
UNKNOWN = 0
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
        return cls(_short(run_id), restart, host, pid, started)

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
        return self.host == host_identity()

    def is_dead(self, heir: Owner | None = None) -> bool:
        """Whether it can never go on: its process is gone, or ``heir`` is a later restart of its run, wherever."""
        if heir is not None and self.run == heir.run and self.restart < heir.restart:
            return True
        if not self.is_here():
            return False
        found = _start_time(self.pid)
        return found is None or found not in (UNKNOWN, self.started)

    def counts(self, age: float, heir: Owner | None = None) -> bool:
        """Whether a mark of this owner, touched ``age`` seconds ago, still stands for something."""
        return not self.is_dead(heir) and (self.is_here() or age < BELIEVED)


def held_by(name: str) -> tuple[str, Owner] | None:
    """The checkpoint that a reader's mark of this name holds, and for whom; None: it is no such mark."""
    return Owner.parse(name[len(HELD) :].rpartition(".")[0]) if name.startswith(HELD) else None


def _short(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def host_identity() -> str:
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
    return _short(host), _start_time(pid) or UNKNOWN


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None: it is gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return UNKNOWN
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
