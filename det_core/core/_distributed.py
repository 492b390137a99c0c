"""DistributedContext: the ranks of a job and their collectives."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from det_core import _clock
from det_core._env import Environment
from det_core._environments import (
    RANK_FIELDS,
    DeepSpeed,
    Horovod,
    Hydra,
    JobEnvironment,
    OpenMpi,
    RayTrain,
    Slurm,
    TensorFlow,
    Torchrun,
    detect_launcher,
)
from det_core._optional import is_installed
from det_core.core._main_guard import exit_if_importing_script
from det_core.core._script_call import script_call
from det_core.errors import ContextClosed, MissingExtra, PeerLost, RendezvousError

if TYPE_CHECKING:
    from det_core.ipc import Communicator, Communicators

PORT = 12360
"""Default port between nodes, where neither ``pub_port`` nor the environment names one."""


class Collectives(Protocol):
    """Collectives of a channel: independent of other channels; one thread at a time."""

    def gather(self, obj: Any, *, timeout: float | None = None) -> list[Any] | None:
        """Return a list of every rank's object on the chief, None elsewhere."""

    def allgather(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Return a list of every rank's object on every rank."""

    def broadcast(self, obj: Any, *, timeout: float | None = None) -> Any:
        """Return the chief's object on every rank."""

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        """Return once every rank has called this."""


class DistributedContext:
    """The ranks that train together. The constructor is the rendezvous: it returns once every rank is there.

    Not a replacement for the collectives of a training framework: it is for the small things around training, such as
    metrics, paths and decisions, and works before and without any framework.

    Args:
        rank: number of this process in the job. Rank 0 is the chief.
        size: number of processes of the job.
        local_rank: number of this process on its node.
        local_size: number of processes of the job on this node.
        cross_rank: number of this node in the job.
        cross_size: number of nodes of the job.
        chief_ip: address of the chief; required (here or in ``DET_CHIEF_IP``) with more than one node.
        pub_port: port on which the chief listens for other nodes. Defaults to ``INTER_TRAIN_PROCESS_COMM_PORT_1``, else
            12360. On one node no port is opened; it only distinguishes jobs that nothing else distinguishes.
        pull_port, port_offset: accepted for compatibility, ignored: one port is enough.
        force_tcp: use TCP on one node too.
        insecure: connect nodes without a shared secret, in clear text: anyone who can reach the chief's port can run
            code in every rank.
        timeout: maximum time of a collective, and of this rendezvous, in seconds. Defaults to ``DET_CORE_TIMEOUT``,
            else they wait as long as every rank lives.

    Raises:
        ValueError: If the numbers contradict each other; the message names the argument.
        RendezvousError: If the ranks cannot find or trust each other.
        PeerLost: If a rank died during the rendezvous.
        CollectiveTimeout: If the rendezvous took longer than ``timeout``.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        cross_rank: int,
        cross_size: int,
        chief_ip: str | None = None,
        pub_port: int | None = None,
        pull_port: int | None = None,
        port_offset: int = 0,
        force_tcp: bool = False,
        insecure: bool = False,
        timeout: float | None = None,
        _job: tuple[str, ...] = (),
        _environment: Environment | None = None,
    ) -> None:
        numbers = dict(zip(RANK_FIELDS, (rank, size, local_rank, local_size, cross_rank, cross_size), strict=True))
        check_numbers(**numbers)
        _check_options(timeout, pub_port)
        environment = _environment or Environment.read()
        self.timeout = environment.timeout if timeout is None else timeout
        chief_ip = chief_ip or environment.chief_ip
        if local_size != size and not chief_ip:
            raise ValueError(
                f"size={size} ranks, local_size={local_size} of them on this node: the others need the address of the "
                'chief. Add it: DistributedContext(…, chief_ip="ADDRESS"), or export DET_CHIEF_IP=ADDRESS'
            )
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size
        self._closed = False
        self._attached: dict[str, Callable[[], None]] = {}
        self._attachments = 0
        self._communicators: Communicators | None = None
        if size > 1:
            # A child has the variables of its parent's rank, and would join as that rank.
            exit_if_importing_script("DistributedContext()")
            from det_core.ipc import connect

            port = pub_port or environment.port or PORT
            self._check_not_duplicate((os.getpid(), rank, port, _job))
            self._communicators = connect(
                **numbers,
                chief_ip=chief_ip,
                port=port,
                job=_job,
                secret=environment.secret,
                insecure=insecure,
                force_tcp=force_tcp,
                timeout=self.timeout,
            )
            self._communicators.describe_calls(script_call)
            _open_contexts.add(self)
        self._user = self.channel("user")
        self._local_user = self.local_channel("user")

    def _check_not_duplicate(self, identity: tuple[Any, ...]) -> None:
        """Raise RendezvousError if this process has a context for this rank already.

        The chief would reject it too, but name this very process as the one that is connected already.
        """
        # The process is part of it: a forked child has copies of its parent's contexts.
        self._identity = identity
        if self.rank == 0:
            return
        for other in tuple(_open_contexts):
            communicator = other.communicator
            if other._identity != identity or other._closed or communicator is None:
                continue
            if communicator.abort_reason is None:
                raise RendezvousError(
                    f"rank {self.rank} already has a DistributedContext in this process: reuse or close it; for "
                    "another job, set pub_port"
                )

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return a context with the ranks that torchrun, or Ray Train, has set.

        Args:
            chief_ip: address of the chief, required with more than one node. Defaults to ``DET_CHIEF_IP``, else
                ``MASTER_ADDR``.

        Raises:
            ValueError: If variables are missing; the message names them.
        """
        return cls._from(chief_ip, Torchrun, RayTrain)

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return a context with the ranks that deepspeed's launcher has set; see :meth:`from_torch_distributed`."""
        return cls._from(chief_ip, DeepSpeed)

    @classmethod
    def from_slurm(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return a context with the ranks that ``srun`` has set; the chief's address is the first node of the step."""
        return cls._from(chief_ip, Slurm)

    @classmethod
    def from_mpi(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return a context with the ranks that ``mpirun`` has set (Open MPI, MPICH, Intel MPI).

        MPI does not number the nodes; the ranks exchange their host names.

        Args:
            chief_ip: address of the chief (or ``DET_CHIEF_IP``), which MPI does not set.

        Raises:
            ValueError: If variables are missing, or it is unclear which ranks share a node.
        """
        return cls._from(chief_ip, OpenMpi, Hydra)

    @classmethod
    def from_tf_config(cls, *, strategy: bool = False) -> tuple[DistributedContext, Any]:
        """Return a context with a rank for each worker of TensorFlow's ``TF_CONFIG``; one rank without it.

        Args:
            strategy: raise if TensorFlow is not installed.

        Returns:
            The context, and TensorFlow's strategy: a ``MultiWorkerMirroredStrategy`` with several workers, else a
            ``MirroredStrategy``, or None if TensorFlow is not installed.

        Raises:
            ValueError: If ``TF_CONFIG`` does not have TensorFlow's form, or this process is not a worker.
            MissingExtra: If ``strategy`` is True and TensorFlow is not installed.
        """
        environment = Environment.read()
        tensorflow = TensorFlow(environment.launch)
        if environment.launch.get("TF_CONFIG") and tensorflow.size() > 1:
            # The strategy comes first: if it raises, no rank waits for this one.
            several_workers = _make_strategy(several=True, required=strategy)
            return cls._of(tensorflow, environment, None), several_workers
        one_worker = _make_strategy(several=False, required=strategy)
        return cls._of(None, environment, None), one_worker

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> DistributedContext:
        """Return a context with the ranks of an initialized horovod module, such as ``horovod.torch``.

        Args:
            hvd: the module, after ``hvd.init()``.
            chief_ip: address of the chief (or ``DET_CHIEF_IP``), required with more than one node.
        """
        numbers = {name: getattr(hvd, name)() for name in RANK_FIELDS}
        return cls(**numbers, chief_ip=chief_ip, _job=Horovod(Environment.read().launch).job())

    @classmethod
    def detect(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return a context with the ranks of the launcher that started this process; one rank without a launcher.

        Args:
            chief_ip: as for :meth:`from_torch_distributed`.

        Raises:
            ValueError: If variables, or an initialized ``torch.distributed``, show several processes, but not which
                one this is; the message says what to set.
        """
        environment = Environment.read()
        return cls._of(detect_launcher(environment.launch), environment, chief_ip)

    @classmethod
    def _from(cls, chief_ip: str | None, *candidates: type[JobEnvironment]) -> DistributedContext:
        """Return a context with the ranks of the candidate that is detected; else raise what the first one lacks."""
        environment = Environment.read()
        launchers = [candidate(environment.launch) for candidate in candidates]
        launcher = next((each for each in launchers if each.detect()), launchers[0])
        return cls._of(launcher, environment, chief_ip)

    @classmethod
    def _of(cls, launcher: JobEnvironment | None, environment: Environment, chief_ip: str | None) -> DistributedContext:
        if launcher is None:
            check_process_group(1)
            return cls(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        ranks = launcher.ranks()
        check_process_group(ranks["size"])
        address = chief_ip or environment.chief_ip or launcher.address()
        context = cls(**ranks, chief_ip=address, _job=launcher.job(), _environment=environment)
        if context.cross_size > 1 and not launcher.knows_nodes:
            try:
                location = (socket.gethostname(), context.local_rank, context.local_size)
                nodes = assign_nodes(context.channel("init").allgather(location))
            except BaseException as e:
                context.close(failure=e)
                raise
            context.cross_rank = nodes[context.rank]
            context.cross_size = max(nodes) + 1
        return context

    # Collectives

    def gather(self, stuff: Any) -> list[Any] | None:
        """Send ``stuff`` to the chief, which returns a list of every rank's; the others return None.

        The workers return once the chief has everything.
        """
        return self._user.gather(stuff)

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """Return every ``stuff`` of this node's ranks on the one with ``local_rank`` 0; None on the others."""
        return self._local_user.gather(stuff)

    def allgather(self, stuff: Any) -> list[Any]:
        """Return a list of every rank's ``stuff``, in the order of ranks, on every rank."""
        return self._user.allgather(stuff)

    def allgather_local(self, stuff: Any) -> list[Any]:
        """Return a list of the ``stuff`` of this node's ranks on every one of them."""
        return self._local_user.allgather(stuff)

    def broadcast(self, stuff: Any = None) -> Any:
        """Return the chief's ``stuff`` on every rank. The chief does not wait for the others."""
        return self._user.broadcast(stuff)

    def broadcast_local(self, stuff: Any = None) -> Any:
        """Return the ``stuff`` of this node's ``local_rank`` 0 on every rank of the node."""
        return self._local_user.broadcast(stuff)

    def barrier(self, name: str = "") -> None:
        """Return once every rank has called this.

        Args:
            name: label in messages, such as the warning about a missing rank.

        Raises:
            PeerLost, CollectiveMismatch, CollectiveTimeout: As any collective.
        """
        self._user.barrier(name)

    def barrier_local(self, name: str = "") -> None:
        """Return once every rank of this node has called this."""
        self._local_user.barrier(name)

    # Numbers

    def get_rank(self) -> int:
        """Return the number of this process in the job."""
        return self.rank

    def get_local_rank(self) -> int:
        """Return the number of this process on its node."""
        return self.local_rank

    def get_size(self) -> int:
        """Return the number of processes of the job."""
        return self.size

    def get_num_agents(self) -> int:
        """Return the number of nodes of the job."""
        return self.cross_size

    # For the other contexts

    @property
    def communicator(self) -> Communicator | None:
        """Connections to all ranks; None in a job of one."""
        if self._communicators is None:
            return None
        return self._communicators.all_ranks

    def channel(self, name: str) -> Collectives:
        """Return collectives of all ranks, independent of other channels; one thread at a time."""
        if self._communicators is None:
            return SingleRankCollectives(self._check_open)
        return self._communicators.channel(name)

    def local_channel(self, name: str) -> Collectives:
        """Return collectives of the ranks of this node, independent of other channels; one thread at a time."""
        if self._communicators is None or self.local_size == 1:
            return SingleRankCollectives(self.check)
        return self._communicators.local_channel(name)

    def check(self) -> None:
        """Raise if the job was aborted.

        Raises:
            ContextClosed: If this context is closed.
            PeerLost, CollectiveMismatch: The reason of the abort.
            SystemExit: If another rank has ended the job.
        """
        self._check_open()
        if self._communicators is not None:
            self._communicators.all_ranks.raise_if_aborted()

    def departed(self) -> Mapping[int, Mapping[str, Any]]:
        """Return the exit info of the ranks that closed in order so far, as given to :meth:`close`."""
        if self._closed or self._communicators is None:
            return {}
        return self._communicators.all_ranks.departed()

    def raise_if_peer_failed(self, within: float = 2.0) -> None:
        """Raise if another rank has exited with an error, or died.

        A framework's own collective reports only that a connection was closed. Which rank closed it, and why, is known
        here a moment later. Call this when such a collective has failed::

            try:
                loss.backward()
            except RuntimeError as e:
                ctx.distributed.raise_if_peer_failed()
                raise

        Args:
            within: maximum wait for the failure to be known, in seconds.

        Raises:
            PeerLost: If a rank has failed; the message has the rank and its error.
            ContextClosed: If this context is closed.
        """
        deadline = _clock.monotonic() + within
        while True:
            self.check()
            if self._communicators is None:
                return
            failures = self._communicators.all_ranks.failures()
            if failures:
                raise PeerLost("; ".join(f"rank {rank} has left after {failures[rank]}" for rank in sorted(failures)))
            remaining = deadline - _clock.monotonic()
            if remaining <= 0:
                return
            time.sleep(min(0.02, remaining))

    def attach(self, kind: str, close: Callable[[], None]) -> int:
        """Register a component whose ``close()`` is called when this context closes, before its connections do.

        Returns:
            Number of registrations so far, equal on every rank that registers in the same order.

        Raises:
            RuntimeError: If a component of this kind is registered.
        """
        if kind in self._attached:
            raise RuntimeError(f"this DistributedContext already has a {kind}: close that first")
        self._attached[kind] = close
        self._attachments += 1
        return self._attachments

    def detach(self, kind: str) -> None:
        """Unregister a closed component."""
        self._attached.pop(kind, None)

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed("this DistributedContext is closed")

    def close(self, *, exit_info: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Disconnect from the other ranks in order, once they have received what was sent to them. Idempotent.

        Args:
            exit_info: what :meth:`departed` returns for this rank on the others.
            failure: error because of which this rank exits, for the message on a rank that still needs it.
        """
        if self._closed:
            return
        try:
            for close in list(self._attached.values()):
                close()
        finally:
            self._closed = True
            if self._communicators is not None:
                self._communicators.close(exit_info=exit_info, failure=failure)

    def __enter__(self) -> DistributedContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failure=error)


_open_contexts: weakref.WeakSet[DistributedContext] = weakref.WeakSet()
"""Contexts of this process that are connected to other ranks."""


class SingleRankCollectives:
    """Collectives of a single rank, which return their argument and load nothing of ipc."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def allgather(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        self._check()
        return [obj]

    gather = allgather

    def broadcast(self, obj: Any, *, timeout: float | None = None) -> Any:
        self._check()
        return obj

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        self._check()


def _make_strategy(*, several: bool, required: bool) -> Any:
    """Return TensorFlow's strategy for all devices of all workers, or of this node; None if it is not installed."""
    if not is_installed("tensorflow"):
        if required:
            raise MissingExtra(
                "a strategy needs tensorflow, which is not installed. Install it: pip install tensorflow"
            )
        return None
    distribute: Any = importlib.import_module("tensorflow").distribute
    if several:
        return distribute.MultiWorkerMirroredStrategy()
    return distribute.MirroredStrategy()


def check_numbers(**numbers: int) -> None:
    """Check that the rank numbers can be those of one process.

    Raises:
        TypeError, ValueError: If they cannot; the message names the argument.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {value!r}")
    for name, limit in (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")):
        if numbers[limit] < 1:
            raise ValueError(f"{limit}={numbers[limit]}: expected at least 1")
        if not 0 <= numbers[name] < numbers[limit]:
            raise ValueError(f"{name}={numbers[name]}: expected 0 to {numbers[limit] - 1} ({limit}={numbers[limit]})")
    size = numbers["size"]
    local_size = numbers["local_size"]
    cross_size = numbers["cross_size"]
    if local_size > size:
        raise ValueError(f"local_size={local_size}: more ranks on this node than in the job (size={size})")
    if cross_size > size:
        raise ValueError(f"cross_size={cross_size}: more nodes than ranks (size={size})")
    if numbers["rank"] == 0 and (numbers["local_rank"] or numbers["cross_rank"]):
        name = "local_rank" if numbers["local_rank"] else "cross_rank"
        raise ValueError(f"{name}={numbers[name]}: rank 0 must be the first rank of the first node")
    if local_size == size and cross_size > 1:
        raise ValueError(f"cross_size={cross_size}: all {size} ranks are on this node (local_size={local_size})")


def _check_options(timeout: float | None, pub_port: int | None) -> None:
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: expected seconds above 0, or None to wait while every rank lives")
    if pub_port is not None and not 0 < pub_port < 65536:
        raise ValueError(f"pub_port={pub_port!r}: expected a port number from 1 to 65535")


def check_process_group(size: int) -> None:
    """Raise ValueError if ``torch.distributed`` was initialized with another number of ranks. Does not import torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    # A torch without distributed, or one that is just being imported, has no such function.
    if not getattr(distributed, "is_initialized", lambda: False)():
        return
    torch_size = distributed.get_world_size()
    if torch_size != size:
        raise ValueError(
            f"torch.distributed was initialised with {torch_size} ranks, but det_core would have {size}: start the "
            "script with a launcher, such as torchrun, that sets all variables of a rank, or pass the ranks, on one "
            f"node: core.DistributedContext(rank=RANK, size={torch_size}, local_rank=RANK, local_size={torch_size}, "
            "cross_rank=0, cross_size=1)"
        )


def assign_nodes(locations: Sequence[tuple[str, int, int]]) -> list[int]:
    """Return the node number of each rank, in the order of the nodes' lowest ranks.

    Args:
        locations: host name, local rank and local size of each rank.

    Raises:
        ValueError: If neither the host names nor blocks of ranks agree with the local sizes.
    """
    names = list(dict.fromkeys(host for host, _, _ in locations))
    by_name = [names.index(host) for host, _, _ in locations]
    by_block: list[int] = []
    for _, local_rank, _ in locations:  # all containers may have the same host name
        by_block.append((by_block or [-1])[-1] + (local_rank == 0))
    for nodes in (by_name, by_block):
        members: dict[int, list[tuple[int, int]]] = {}
        for node, (_, local_rank, local_size) in zip(nodes, locations, strict=True):
            members.setdefault(node, []).append((local_rank, local_size))
        if all(sorted(ranks) == [(i, len(ranks)) for i in range(len(ranks))] for ranks in members.values()):
            return nodes
    raise ValueError(
        "cannot compute node numbers: neither the host names nor the order of the ranks agrees with the local sizes "
        f"{locations!r}; pass the ranks: DistributedContext(rank=…, size=…, …)"
    )
