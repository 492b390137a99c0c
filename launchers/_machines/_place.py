"""Where a job runs: its machines, and which of them this is."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from .._words._options import UsageError
from ._hosts import Host

PORT = 29500
"""Where the machines of a job meet if nothing says otherwise; as torchrun's and deepspeed's."""


@dataclass(frozen=True)
class Place:
    """The machines of a job, in the order of their ranks."""

    where: str
    """What told of them, as a person knows it ("Slurm")."""
    hosts: tuple[Host, ...]
    node_rank: int = 0
    """The index of this machine."""
    port: int = PORT
    """Where the machines meet."""
    known: bool = True
    """Whether the names of ``hosts`` are addresses; else only the first one's is."""
    notice: str = ""
    """What a person should know of it."""

    @property
    def here(self) -> Host:
        """This machine."""
        return self.hosts[self.node_rank]

    @property
    def chief(self) -> str:
        """The address of the first machine; that of the loopback where there is no other."""
        return self.hosts[0].name if self.several else "127.0.0.1"

    @property
    def several(self) -> bool:
        """Whether there is another machine."""
        return len(self.hosts) > 1

    @property
    def size(self) -> int:
        """How many ranks there are on all machines."""
        return sum(host.slots for host in self.hosts)

    @property
    def first_rank(self) -> int:
        """The first rank of this machine."""
        return sum(host.slots for host in self.hosts[: self.node_rank])


def index_of_this_machine(hosts: Sequence[Host], where: str) -> int:
    """Which of ``hosts`` this machine is, by its name or its addresses.

    Raises:
        UsageError: none of them, or several are.
    """
    found = [number for number, host in enumerate(hosts) if is_here(host.name)]
    if len(found) == 1:
        return found[0]
    which = "several hosts" if found else "no host"
    raise UsageError(f"{which} of {where} is this machine ({socket.gethostname()}): say which with --node-rank R")


def is_here(name: str) -> bool:
    """Whether a host's name or address is this machine's."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
