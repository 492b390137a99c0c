"""From rank numbers to connected stars: one for the job, and one for each machine where there are several."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from det_core.errors import RendezvousError
from det_core.ipc._collectives import Channel
from det_core.ipc._communicator import Communicator
from det_core.ipc._join import join_remote, join_unix
from det_core.ipc._membership import MAX_IN_FLIGHT_BYTES, AbortReason
from det_core.ipc._rendezvous import ChiefRendezvous, rendezvous_path
from det_core.ipc._zmq_link import ChiefKey


@dataclass(frozen=True)
class RankConfig:
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
    bound: int = MAX_IN_FLIGHT_BYTES

    @property
    def is_single_node(self) -> bool:
        """Whether all ranks of the job are on this machine."""
        return self.local_size == self.size

    @property
    def tcp(self) -> bool:
        """Whether any link of the job goes over TCP."""
        return self.force_tcp or not self.is_single_node

    @property
    def on_chief_node(self) -> bool:
        """Whether this rank surely is on the chief's machine. (Where machines differ in size, Horovod's cross_rank
        alone does not say so; a rank that cannot be sure takes TCP, which always works.)"""
        in_blocks = self.rank == self.local_rank
        in_turns = self.rank == self.local_rank * self.cross_size
        return self.is_single_node or (self.cross_rank == 0 and (in_blocks or in_turns))

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
class Communicators:
    """The stars of one rank: the one of the whole job, and the one of its machine where that is another."""

    all_ranks: Communicator
    local: Communicator | None = None

    def channel(self, name: str) -> Channel:
        """Collectives of all ranks."""
        return self.all_ranks.channel(name)

    def local_channel(self, name: str) -> Channel:
        """Collectives of the ranks of this machine; on one machine, a lane of its own in the one star."""
        return self.all_ranks.channel(f"local {name}") if self.local is None else self.local.channel(name)

    def describe_calls(self, describe: Callable[[], str]) -> None:
        """Have messages name what the script calls as ``describe()`` does in the thread of the call."""
        for communicator in (self.all_ranks, self.local):
            if communicator is not None:
                communicator.describe_call = describe

    def close(self, *, exit_info: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Close the star of the machine, then that of the job."""
        try:
            if self.local is not None:
                self.local.close(failure=failure)
        finally:
            self.all_ranks.close(exit_info=exit_info, failure=failure)


def connect(**place: Any) -> Communicators:
    """The rendezvous: returns once every rank of the job is connected.

    Args:
        place: the fields of :class:`RankConfig`.

    Raises:
        RendezvousError: the ranks cannot find or trust each other.
        CollectiveTimeout: a timeout is set, and has passed.
        PeerLost: a rank died meanwhile.
    """
    config = RankConfig(**place)
    key = config.key() if config.tcp else None
    all_ranks = _open(lambda communicator: _meet(communicator, config, key), config, config.rank, range(config.size))
    links = Communicators(all_ranks)
    try:
        if not config.is_single_node:
            links.local = _local_star(all_ranks, config)
    except BaseException as e:
        links.close(failure=e)
        raise
    return links


def _open(
    meet: Callable[[Communicator], None], config: RankConfig, rank: int, job_ranks: Sequence[int]
) -> Communicator:
    communicator = Communicator(rank=rank, job_ranks=job_ranks, timeout=config.timeout, bound=config.bound)
    try:
        meet(communicator)
    except BaseException as e:
        communicator.close(failure=e)
        raise
    return communicator


def _meet(communicator: Communicator, config: RankConfig, key: ChiefKey | None) -> None:
    if communicator.rank:
        if config.force_tcp or not config.on_chief_node:
            host = "127.0.0.1" if config.is_single_node else str(config.chief_ip).strip("[]")
            lifeline = not config.is_single_node and config.local_rank == 0
            join_remote(communicator, host, config.port, key, config.digest, lifeline=lifeline)
        else:
            join_unix(communicator, config.path, config.secret, config.digest)
        return
    rendezvous = ChiefRendezvous(communicator, config.secret, config.digest)
    if config.tcp:
        rendezvous.listen_tcp("127.0.0.1" if config.is_single_node else "*", config.port, key)
    if not config.force_tcp:
        rendezvous.listen_unix(config.path)
    rendezvous.wait()


def _local_star(all_ranks: Communicator, config: RankConfig) -> Communicator | None:
    """The star of this machine, whose chief announces its name to everybody; trouble in one star is trouble in both."""
    token = secrets.token_hex(16) if config.local_rank == 0 else ""
    me = (socket.gethostname(), config.cross_rank, config.rank, config.local_rank, token)
    everybody = all_ranks.channel("init").allgather(me)
    if config.local_size == 1:
        return None
    mine = _same_machine(everybody, me, config.local_size)
    path = rendezvous_path(("machine", mine[0][4]))
    job_ranks = [entry[2] for entry in mine]

    def meet(communicator: Communicator) -> None:
        def check() -> None:  # who leaves the job before it came config will not come
            for local_rank, rank in enumerate(job_ranks):
                if local_rank not in communicator.peers and rank in all_ranks.departed():
                    failure = all_ranks.failures().get(rank)
                    what = "closed its context, and never joined the ranks of its machine"
                    communicator.abort(
                        AbortReason("lost", f"rank {rank} has {what}" + (f": {failure}" if failure else ""))
                    )
            communicator.raise_if_aborted()

        all_ranks.forward_aborts_to(communicator)
        communicator.forward_aborts_to(all_ranks)
        if config.local_rank:
            join_unix(communicator, path, config.secret, "", check)
        else:
            rendezvous = ChiefRendezvous(communicator, config.secret, "")
            rendezvous.listen_unix(path)
            rendezvous.wait(check)

    return _open(meet, config, config.local_rank, job_ranks)


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
