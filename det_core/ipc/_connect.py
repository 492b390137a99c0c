"""Connection of the ranks: one communicator for the job, and one for each node if there are several."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from det_core.errors import RendezvousError
from det_core.ipc._collectives import Channel
from det_core.ipc._communicator import Communicator
from det_core.ipc._join import join_remote, join_unix
from det_core.ipc._listener import rendezvous_path
from det_core.ipc._membership import AbortReason
from det_core.ipc._peer import MAX_IN_FLIGHT_BYTES
from det_core.ipc._rendezvous import ChiefRendezvous
from det_core.ipc._zmq_link import ChiefKey


@dataclass(frozen=True)
class RankConfig:
    """Position of this rank in the job, and how the ranks find and trust each other."""

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
    max_in_flight: int = MAX_IN_FLIGHT_BYTES

    @property
    def is_single_node(self) -> bool:
        """Whether all ranks of the job are on this node."""
        return self.local_size == self.size

    @property
    def uses_tcp(self) -> bool:
        """Whether any link of the job goes over TCP."""
        return self.force_tcp or not self.is_single_node

    @property
    def on_chief_node(self) -> bool:
        """Whether this rank is certainly on the chief's node."""
        if self.is_single_node:
            return True
        # Horovod's cross_rank alone is ambiguous where nodes differ in size. A rank that cannot be certain takes TCP,
        # which works within a node, too.
        in_blocks = self.rank == self.local_rank
        round_robin = self.rank == self.local_rank * self.cross_size
        return self.cross_rank == 0 and (in_blocks or round_robin)

    @property
    def digest(self) -> str:
        """The job's name in messages between the ranks."""
        return hashlib.sha256("\0".join(self.job).encode()).hexdigest()[:32]

    @property
    def path(self) -> str:
        """Path of the chief's socket on its own node."""
        return rendezvous_path((*self.job, f"port={self.port}", f"secret={self.secret or ''}"))

    def key(self) -> ChiefKey | None:
        """Return the keys for links between nodes, or None if the job is insecure.

        Raises:
            RendezvousError: If the job has no secret to derive them from.
        """
        if self.insecure:
            return None
        if self.secret:
            return ChiefKey.derive(self.secret)
        raise RendezvousError(
            f"{self.cross_size} nodes without a shared secret: messages between ranks can run code, so each sender "
            "must prove that it belongs to the job. Type on one node\n"
            "    openssl rand -hex 32\n"
            "and on every node, before you start the script,\n"
            "    export DET_CORE_SECRET=THE_NUMBER_IT_PRINTED\n"
            "In a network where you trust every host, DistributedContext(..., insecure=True) needs no secret."
        )


@dataclass
class Communicators:
    """Communicators of one rank: for the whole job, and for its node if the job has several."""

    all_ranks: Communicator
    local: Communicator | None = None

    def channel(self, name: str) -> Channel:
        """Return a channel of all ranks."""
        return self.all_ranks.channel(name)

    def local_channel(self, name: str) -> Channel:
        """Return a channel of the ranks of this node."""
        if self.local is None:
            return self.all_ranks.channel(f"local {name}")
        return self.local.channel(name)

    def describe_calls(self, describe: Callable[[], str]) -> None:
        """Use ``describe()``, called in the thread of a call, as the script's name for the call in messages."""
        self.all_ranks.describe_call = describe
        if self.local is not None:
            self.local.describe_call = describe

    def close(self, *, exit_info: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Close the communicator of the node, then that of the job; arguments as in ``Communicator.close``."""
        try:
            if self.local is not None:
                self.local.close(failure=failure)
        finally:
            self.all_ranks.close(exit_info=exit_info, failure=failure)


def connect(**fields: Any) -> Communicators:
    """Connect this rank to all others; return once every rank of the job is connected.

    Args:
        fields: fields of :class:`RankConfig`.

    Raises:
        RendezvousError: If the ranks cannot find or do not trust each other.
        CollectiveTimeout: At the deadline, if there is a timeout.
        PeerLost: If a rank died meanwhile.
    """
    config = RankConfig(**fields)
    key = None
    if config.uses_tcp:
        key = config.key()

    def meet(communicator: Communicator) -> None:
        _meet(communicator, config, key)

    communicators = Communicators(_open(meet, config, config.rank, range(config.size)))
    try:
        if not config.is_single_node:
            communicators.local = _open_local(communicators.all_ranks, config)
    except BaseException as e:
        communicators.close(failure=e)
        raise
    return communicators


def _open(
    meet: Callable[[Communicator], None], config: RankConfig, rank: int, job_ranks: Sequence[int]
) -> Communicator:
    """Return a communicator after its rendezvous, for which ``meet`` is called."""
    communicator = Communicator(
        rank=rank, job_ranks=job_ranks, timeout=config.timeout, max_in_flight=config.max_in_flight
    )
    try:
        meet(communicator)
    except BaseException as e:
        communicator.close(failure=e)
        raise
    return communicator


def _meet(communicator: Communicator, config: RankConfig, key: ChiefKey | None) -> None:
    """Do the rendezvous of the job, on the chief or on a worker."""
    if communicator.rank == 0:
        rendezvous = ChiefRendezvous(communicator, config.secret, config.digest)
        if config.uses_tcp:
            rendezvous.listen_tcp("127.0.0.1" if config.is_single_node else "*", config.port, key)
        if not config.force_tcp:
            rendezvous.listen_unix(config.path)
        rendezvous.wait()
    elif config.on_chief_node and not config.force_tcp:
        join_unix(communicator, config.path, config.secret, config.digest)
    else:
        host = str(config.chief_ip).strip("[]")
        if config.is_single_node:
            host = "127.0.0.1"
        # One for each node: a thousand ranks would hold a thousand idle connections for the same information.
        lifeline = not config.is_single_node and config.local_rank == 0
        join_remote(communicator, host, config.port, key, config.digest, lifeline=lifeline)


def _open_local(all_ranks: Communicator, config: RankConfig) -> Communicator | None:
    """Return the communicator of this node, or None for a node with a single rank."""
    token = ""
    if config.local_rank == 0:
        token = secrets.token_hex(16)
    own = _Entry(socket.gethostname(), config.cross_rank, config.rank, config.local_rank, token)
    entries = all_ranks.channel("init").allgather(tuple(own))
    if config.local_size == 1:
        return None
    local = _same_node([_Entry(*entry) for entry in entries], own, config.local_size)
    # By a token instead of the job's key: containers on one host are nodes that share /tmp.
    path = rendezvous_path(("machine", local[0].token))
    job_ranks = [entry.rank for entry in local]

    def meet(communicator: Communicator) -> None:
        def check() -> None:
            # A rank that closes the job's communicator before it gets here will never connect.
            for local_rank, rank in enumerate(job_ranks):
                if local_rank not in communicator.peers and rank in all_ranks.departed():
                    text = f"rank {rank} has closed its context, and never joined the ranks of its node"
                    if failure := all_ranks.failures().get(rank):
                        text += f": {failure}"
                    communicator.abort(AbortReason("lost", text))
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


class _Entry(NamedTuple):
    """A rank's own description, which all ranks exchange to find those of their node."""

    host: str
    cross_rank: int
    rank: int
    local_rank: int
    token: str


def _same_node(entries: Sequence[_Entry], own: _Entry, local_size: int) -> list[_Entry]:
    """Return the entries of this node by local rank.

    Raises:
        RendezvousError: If neither the host name nor ``cross_rank`` identifies ``local_size`` ranks.
    """
    # Either is enough: some launchers number the nodes wrongly, and some clusters give all hosts one name.
    for candidates in (
        [entry for entry in entries if entry.host == own.host],
        [entry for entry in entries if entry.cross_rank == own.cross_rank],
    ):
        candidates.sort(key=lambda entry: entry.local_rank)
        if [entry.local_rank for entry in candidates] == list(range(local_size)):
            return candidates
    raise RendezvousError(
        f"cannot find the {local_size} ranks of this node (local_size={local_size}): expected that many, with local "
        f"ranks 0 to {local_size - 1}, with the host name {own.host!r} or with cross_rank={own.cross_rank}"
    )
