"""From rank numbers to connected stars: one for the job, and one for each machine where there are several."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from det_core.errors import RendezvousError
from det_core.ipc._collectives import Lane
from det_core.ipc._join import join_remote, join_unix
from det_core.ipc._membership import QUEUE_BOUND, Trouble
from det_core.ipc._rendezvous import Assembly, rendezvous_path
from det_core.ipc._star import Star
from det_core.ipc._zmq_link import ChiefKey


@dataclass(frozen=True)
class Place:
    """Where this rank is in the job, and how the job's ranks find and trust each other."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    chief_ip: str | None
    port: int
    job: tuple[str, ...] = ()
    secret: str | None = None
    insecure: bool = False
    force_tcp: bool = False
    timeout: float | None = None
    bound: int = QUEUE_BOUND

    @property
    def one_machine(self) -> bool:
        """Whether all ranks of the job are on this machine."""
        return self.local_size == self.size

    @property
    def tcp(self) -> bool:
        """Whether any link of the job goes over TCP."""
        return self.force_tcp or not self.one_machine

    @property
    def beside_chief(self) -> bool:
        """Whether this rank surely is on the chief's machine. (Where machines differ in size, Horovod's cross_rank
        alone does not say so; a rank that cannot be sure takes TCP, which always works.)"""
        in_blocks = self.rank == self.local_rank
        in_turns = self.rank == self.local_rank * self.cross_size
        return self.one_machine or (self.cross_rank == 0 and (in_blocks or in_turns))

    @property
    def digest(self) -> str:
        """The job, as a worker names it to the chief."""
        return hashlib.sha256("\0".join(self.job).encode()).hexdigest()[:32]

    @property
    def path(self) -> str:
        """Where the ranks on the chief's machine meet."""
        return rendezvous_path((*self.job, f"port={self.port}", f"secret={self.secret or ''}"))

    def key(self) -> ChiefKey | None:
        """The key for links between machines; None: insecure.

        Raises:
            RendezvousError: there is no secret to make it from.
        """
        if self.insecure:
            return None
        if self.secret:
            return ChiefKey.derive(self.secret)
        raise RendezvousError(
            f"{self.cross_size} machines and no secret that they share: what they send each other can run code, so it "
            "must not come from just anybody. Type on one machine\n"
            "    openssl rand -hex 32\n"
            "and on every machine, before starting the script,\n"
            "    export DET_CORE_SECRET=THE_NUMBER_IT_PRINTED\n"
            "In a network where everybody may do everything, DistributedContext(..., insecure=True) goes without."
        )


@dataclass
class Links:
    """The stars of one rank: the one of the whole job, and the one of its machine where that is another."""

    everyone: Star
    local: Star | None = None

    def lane(self, name: str) -> Lane:
        """Collectives of all ranks."""
        return self.everyone.lane(name)

    def local_lane(self, name: str) -> Lane:
        """Collectives of the ranks of this machine; on one machine, a lane of its own in the one star."""
        return self.everyone.lane(f"local {name}") if self.local is None else self.local.lane(name)

    def describe_calls(self, describe: Callable[[], str]) -> None:
        """Have messages name what the script calls as ``describe()`` does in the thread of the call."""
        for star in (self.everyone, self.local):
            if star is not None:
                star.describe_call = describe

    def close(self, *, farewell: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Close the star of the machine, then that of the job."""
        try:
            if self.local is not None:
                self.local.close(failure=failure)
        finally:
            self.everyone.close(farewell=farewell, failure=failure)


def connect(**place: Any) -> Links:
    """The rendezvous: returns once every rank of the job is connected.

    Args:
        place: the fields of :class:`Place`.

    Raises:
        RendezvousError: the ranks cannot find or trust each other.
        CollectiveTimeout: a timeout is set, and has passed.
        PeerLost: a rank died meanwhile.
    """
    here = Place(**place)
    key = here.key() if here.tcp else None
    everyone = _open(lambda star: _meet(star, here, key), here, here.rank, range(here.size))
    links = Links(everyone)
    try:
        if not here.one_machine:
            links.local = _local_star(everyone, here)
    except BaseException as e:
        links.close(failure=e)
        raise
    return links


def _open(meet: Callable[[Star], None], here: Place, rank: int, names: Sequence[int]) -> Star:
    star = Star(rank=rank, names=names, timeout=here.timeout, bound=here.bound)
    try:
        meet(star)
    except BaseException as e:
        star.close(failure=e)
        raise
    return star


def _meet(star: Star, here: Place, key: ChiefKey | None) -> None:
    if star.rank:
        if here.force_tcp or not here.beside_chief:
            host = "127.0.0.1" if here.one_machine else str(here.chief_ip).strip("[]")
            lifeline = not here.one_machine and here.local_rank == 0
            join_remote(star, host, here.port, key, here.digest, lifeline=lifeline)
        else:
            join_unix(star, here.path, here.secret, here.digest)
        return
    assembly = Assembly(star, here.secret, here.digest)
    if here.tcp:
        assembly.open_port("127.0.0.1" if here.one_machine else "*", here.port, key)
    if not here.force_tcp:
        assembly.open_door(here.path)
    assembly.wait()


def _local_star(everyone: Star, here: Place) -> Star | None:
    """The star of this machine, whose chief announces its name to everybody; trouble in one star is trouble in both."""
    token = secrets.token_hex(16) if here.local_rank == 0 else ""
    me = (socket.gethostname(), here.cross_rank, here.rank, here.local_rank, token)
    everybody = everyone.lane("init").allgather(me)
    if here.local_size == 1:
        return None
    mine = _same_machine(everybody, me, here.local_size)
    path = rendezvous_path(("machine", mine[0][4]))
    names = [entry[2] for entry in mine]

    def meet(star: Star) -> None:
        def check() -> None:  # who leaves the job before it came here will not come
            for local_rank, rank in enumerate(names):
                if local_rank not in star.peers and rank in everyone.departed():
                    failure = everyone.failures().get(rank)
                    what = "closed its context, and never joined the ranks of its machine"
                    star.break_off(Trouble("lost", f"rank {rank} has {what}" + (f": {failure}" if failure else "")))
            star.raise_if_broken()

        everyone.share_trouble(star)
        star.share_trouble(everyone)
        if here.local_rank:
            join_unix(star, path, here.secret, "", check)
        else:
            assembly = Assembly(star, here.secret, "")
            assembly.open_door(path)
            assembly.wait(check)

    return _open(meet, here, here.local_rank, names)


_Entry = tuple[str, int, int, int, str]


def _same_machine(everybody: Sequence[_Entry], me: _Entry, local_size: int) -> list[_Entry]:
    """The entries of this machine by local rank: those of one host name, or of one number of the machine."""
    for column in (0, 1):
        found = sorted((e for e in everybody if e[column] == me[column]), key=lambda e: e[3])
        if [e[3] for e in found] == list(range(local_size)):
            return found
    raise RendezvousError(
        f"{local_size} ranks should be on this machine (local_size={local_size}), but neither the host name "
        f"{me[0]!r} nor cross_rank={me[1]} is that of exactly so many ranks, with local ranks 0 to {local_size - 1}"
    )
