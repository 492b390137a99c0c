"""DistributedContext: the ranks of a job, and what they say to each other."""

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
from det_core._environments import RANK_FIELDS, JobEnvironment, detect_launcher, launcher_for
from det_core._optional import is_installed
from det_core.core._main_guard import exit_if_importing_script
from det_core.core._script_call import script_call
from det_core.errors import ContextClosed, MissingExtra, PeerLost, RendezvousError

if TYPE_CHECKING:
    from det_core.ipc import Communicator, Communicators

PORT = 12360
"""The port between machines where neither ``pub_port`` nor the environment names one."""


class Collectives(Protocol):
    """Collectives with a sequence of their own: a lane of a star, or of a job of one rank."""

    def gather(self, obj: Any, *, timeout: float | None = None) -> list[Any] | None:
        """A list of every rank's object on the chief, None elsewhere."""

    def allgather(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """A list of every rank's object on every rank."""

    def broadcast(self, obj: Any, *, timeout: float | None = None) -> Any:
        """The chief's object on every rank."""

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        """Return once every rank is there."""


class DistributedContext:
    """The ranks that train together. Constructing it is the rendezvous: it returns once every rank is there.

    Not a replacement for the collectives of a training framework: it is for the small things around training, such as
    metrics, paths and decisions, and works before and without any framework.

    Args:
        rank: number of this process in the job. Rank 0 is the chief.
        size: how many processes the job has.
        local_rank: number of this process on its machine.
        local_size: how many processes of the job are on this machine.
        cross_rank: number of this machine in the job.
        cross_size: how many machines the job has.
        chief_ip: address of the chief; needed (here or in ``DET_CHIEF_IP``) with more than one machine.
        pub_port: the port on which the chief listens for other machines. Left out:
            ``INTER_TRAIN_PROCESS_COMM_PORT_1``, else 12360. On one machine no port is opened; it only keeps jobs
            apart that have nothing else to tell them apart.
        pull_port, port_offset: accepted for compatibility, unused: one port does.
        force_tcp: use TCP on one machine too.
        insecure: let machines talk without a shared secret, in clear text: anyone who can reach the chief's port can
            run code in every rank.
        timeout: seconds after which a collective (or this rendezvous) raises CollectiveTimeout. Left out:
            ``DET_CORE_TIMEOUT``, else they wait as long as every rank lives.

    Raises:
        ValueError: the numbers contradict each other; the message names the argument.
        RendezvousError: the ranks cannot detect_launcher or trust each other.
        PeerLost: a rank died during the rendezvous.
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
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds above 0, or None to wait while every rank lives")
        if pub_port is not None and not 0 < pub_port < 65536:
            raise ValueError(f"pub_port={pub_port!r}: expected a port number from 1 to 65535")
        environment = Environment.read() if _environment is None else _environment
        self.timeout = environment.timeout if timeout is None else timeout
        chief_ip = chief_ip or environment.chief_ip
        if local_size != size and not chief_ip:
            raise ValueError(
                f"size={size} ranks, local_size={local_size} of them on this machine: the others need the address of "
                'the chief. Add it: DistributedContext(…, chief_ip="ADDRESS"), or export DET_CHIEF_IP=ADDRESS'
            )
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self.cross_rank, self.cross_size = cross_rank, cross_size
        self._closed = False
        self._attached: dict[str, Callable[[], None]] = {}
        self._attachments = 0
        self._communicators: Communicators | None = None
        if size > 1:
            # A child has the variables of its parent's rank, and would take part as that.
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

    def _check_not_duplicate(self, place: tuple[Any, ...]) -> None:
        """The chief would refuse it too, but name this very process as the one that is there already."""
        self._place = place  # with the process: a forked child has copies of its parent's contexts
        others = [each for each in tuple(_open_contexts) if each._place == place and not each._closed]
        if self.rank and any(
            each.communicator is not None and each.communicator.abort_reason is None for each in others
        ):
            raise RendezvousError(
                f"this process has a DistributedContext for rank {self.rank} of this job already. Use that one, or "
                "close it first; for links of another job give this one a pub_port of its own"
            )

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """From what torchrun, or Ray Train, sets for each process.

        Args:
            chief_ip: address of the chief, needed with more than one machine. Left out: ``DET_CHIEF_IP``, else
                ``MASTER_ADDR``.

        Raises:
            ValueError: variables are missing; the message names them.
        """
        return cls._from("from_torch_distributed", chief_ip)

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """From what deepspeed's launcher sets for each process; arguments as in ``from_torch_distributed``."""
        return cls._from("from_deepspeed", chief_ip)

    @classmethod
    def from_slurm(cls, chief_ip: str | None = None) -> DistributedContext:
        """From what ``srun`` sets for each task; the chief's address is the first node of the step."""
        return cls._from("from_slurm", chief_ip)

    @classmethod
    def from_mpi(cls, chief_ip: str | None = None) -> DistributedContext:
        """From what ``mpirun`` sets for each process (Open MPI, MPICH, Intel MPI).

        MPI does not tell a process the number of its machine; the ranks ask each other.

        Args:
            chief_ip: address of the chief (or ``DET_CHIEF_IP``): MPI does not tell it.

        Raises:
            ValueError: variables are missing, or the ranks cannot tell which of them share a machine.
        """
        return cls._from("from_mpi", chief_ip)

    @classmethod
    def from_tf_config(cls, *, strategy: bool = False) -> tuple[DistributedContext, Any]:
        """From TensorFlow's ``TF_CONFIG``, one rank for each of its workers; of one rank where there is none.

        Args:
            strategy: TensorFlow is to be there: raise where it is not installed.

        Returns:
            The context, and TensorFlow's strategy: a ``MultiWorkerMirroredStrategy`` with several workers, else a
            ``MirroredStrategy``. None in its place where TensorFlow is not installed.

        Raises:
            ValueError: ``TF_CONFIG`` is not of TensorFlow's form, or this process is no worker.
            MissingExtra: ``strategy``, and TensorFlow is not installed.
        """
        environment = Environment.read()
        tensorflow = launcher_for("from_tf_config", environment.launch)
        given = bool(environment.launch.get("TF_CONFIG"))
        several = given and tensorflow.size() > 1
        made = _make_strategy(several=several, required=strategy)  # before the ranks meet: it may raise
        return cls._of(tensorflow if several else None, environment, None), made

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> DistributedContext:
        """From an initialised horovod module, such as ``horovod.torch``.

        Args:
            hvd: the module, after ``hvd.init()``.
            chief_ip: address of the chief (or ``DET_CHIEF_IP``), needed with more than one machine.
        """
        launch = Environment.read().launch
        numbers = {name: getattr(hvd, name)() for name in RANK_FIELDS}
        return cls(**numbers, chief_ip=chief_ip, _job=launcher_for("from_horovod", launch).job())

    @classmethod
    def detect(cls, chief_ip: str | None = None) -> DistributedContext:
        """From whichever launcher started this process; of one rank where none did.

        Args:
            chief_ip: as for ``from_torch_distributed``.

        Raises:
            ValueError: variables, or an initialised ``torch.distributed``, tell of several processes, but not which
                one this is; the message says what to set.
        """
        environment = Environment.read()
        return cls._of(detect_launcher(environment.launch), environment, chief_ip)

    @classmethod
    def _from(cls, constructor: str, chief_ip: str | None) -> DistributedContext:
        environment = Environment.read()
        return cls._of(launcher_for(constructor, environment.launch), environment, chief_ip)

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
                places = context.channel("init").allgather(
                    (socket.gethostname(), context.local_rank, context.local_size)
                )
                machines = assign_nodes(places)
            except BaseException as e:
                context.close(failure=e)
                raise
            context.cross_rank, context.cross_size = machines[context.rank], max(machines) + 1
        return context

    # collectives

    def gather(self, stuff: Any) -> list[Any] | None:
        """Send ``stuff`` to the chief, which returns a list of every rank's; the others return None.

        The workers return once the chief has everything.
        """
        return self._user.gather(stuff)

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """``gather`` among the ranks of this machine, to the one with ``local_rank`` 0."""
        return self._local_user.gather(stuff)

    def allgather(self, stuff: Any) -> list[Any]:
        """Return a list of every rank's ``stuff``, in the order of ranks, on every rank."""
        return self._user.allgather(stuff)

    def allgather_local(self, stuff: Any) -> list[Any]:
        """``allgather`` among the ranks of this machine."""
        return self._local_user.allgather(stuff)

    def broadcast(self, stuff: Any = None) -> Any:
        """Return the chief's ``stuff`` on every rank. The chief does not wait for the others."""
        return self._user.broadcast(stuff)

    def broadcast_local(self, stuff: Any = None) -> Any:
        """Return the ``stuff`` of this machine's ``local_rank`` 0 on every rank of this machine."""
        return self._local_user.broadcast(stuff)

    def barrier(self, name: str = "") -> None:
        """Return once every rank has called this.

        Args:
            name: appears where messages say what is waited for, as in the warning when a rank is missing.

        Raises:
            PeerLost, CollectiveMismatch, CollectiveTimeout: as any collective.
        """
        self._user.barrier(name)

    def barrier_local(self, name: str = "") -> None:
        """``barrier`` among the ranks of this machine."""
        self._local_user.barrier(name)

    # numbers

    def get_rank(self) -> int:
        """The number of this process in the job."""
        return self.rank

    def get_local_rank(self) -> int:
        """The number of this process on its machine."""
        return self.local_rank

    def get_size(self) -> int:
        """How many processes the job has."""
        return self.size

    def get_num_agents(self) -> int:
        """How many machines the job has."""
        return self.cross_size

    # for the other contexts

    @property
    def communicator(self) -> Communicator | None:
        """The links between all ranks; None in a job of one."""
        return None if self._communicators is None else self._communicators.all_ranks

    def channel(self, name: str) -> Collectives:
        """Collectives of all ranks, on a sequence of their own that any one thread may use."""
        if self._communicators is None:
            return SingleRankCollectives(self._check_open)
        return self._communicators.channel(name)

    def local_channel(self, name: str) -> Collectives:
        """Collectives of the ranks of this machine, on a sequence of their own."""
        if self._communicators is None or self.local_size == 1:
            return SingleRankCollectives(self.check)
        return self._communicators.local_channel(name)

    def check(self) -> None:
        """Raise if the job is broken.

        Raises:
            ContextClosed: this context is closed.
            PeerLost, CollectiveMismatch: what broke the job.
            SystemExit: another rank has ended the job.
        """
        self._check_open()
        if self._communicators is not None:
            self._communicators.all_ranks.raise_if_aborted()

    def departed(self) -> Mapping[int, Mapping[str, Any]]:
        """The ranks that have said goodbye so far, each with the ``farewell`` it gave to :meth:`close`."""
        return {} if self._closed or self._communicators is None else self._communicators.all_ranks.departed()

    def raise_if_peer_failed(self, within: float = 2.0) -> None:
        """Raise if another rank has left with an error, or died.

        A framework's own collective says only that a connection was closed; who closed it, and why, is known here a
        moment later. Call it when such a collective has failed::

            try:
                loss.backward()
            except RuntimeError as e:
                ctx.distributed.raise_if_peer_failed()
                raise

        Args:
            within: seconds to wait for that news.

        Raises:
            PeerLost: with the rank and its error.
            ContextClosed: this context is closed.
        """
        deadline = _clock.monotonic() + within
        while True:
            self.check()
            failures = {} if self._communicators is None else self._communicators.all_ranks.failures()
            if failures:
                raise PeerLost("; ".join(f"rank {rank} has left after {failures[rank]}" for rank in sorted(failures)))
            if self._communicators is None or (left := deadline - _clock.monotonic()) <= 0:
                return
            time.sleep(min(0.02, left))

    def attach(self, what: str, close: Callable[[], None]) -> int:
        """Have ``close()`` called when this context is closed, before the links go.

        Returns:
            How many were attached so far, the same on every rank that attaches in the same order.

        Raises:
            RuntimeError: there is one of its kind already.
        """
        if what in self._attached:
            raise RuntimeError(f"this DistributedContext has a {what} already; close that first")
        self._attached[what] = close
        self._attachments += 1
        return self._attachments

    def detach(self, what: str) -> None:
        """It is closed."""
        self._attached.pop(what, None)

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed("this DistributedContext is closed")

    def close(self, *, exit_info: Mapping[str, Any] | None = None, failure: BaseException | None = None) -> None:
        """Say goodbye and let go of the other ranks; waits until they have what was sent to them. Idempotent.

        Args:
            exit_info: what the other ranks can read in :meth:`departed`.
            failure: why this rank stops, for the message of a rank that still needs it.
        """
        if self._closed:
            return
        try:
            for close_it in list(self._attached.values()):
                close_it()
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
"""The contexts of this process that are linked to other ranks."""


class SingleRankCollectives:
    """A lane of one rank, which loads nothing of what links ranks: everything comes back as it is."""

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
    """TensorFlow's way of training on all devices of all workers, or of this machine; None: it is not installed."""
    if not is_installed("tensorflow"):
        if required:
            raise MissingExtra(
                "a strategy needs tensorflow, which is not installed. Install it: pip install tensorflow"
            )
        return None
    distribute: Any = importlib.import_module("tensorflow").distribute
    return distribute.MultiWorkerMirroredStrategy() if several else distribute.MirroredStrategy()


def check_numbers(**numbers: int) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the rank numbers can be those of one process."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {value!r}")
    for name, limit in (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")):
        if numbers[limit] < 1:
            raise ValueError(f"{limit}={numbers[limit]}: expected at least 1")
        if not 0 <= numbers[name] < numbers[limit]:
            raise ValueError(f"{name}={numbers[name]}: expected 0 to {numbers[limit] - 1} ({limit}={numbers[limit]})")
    size, local_size, cross_size = numbers["size"], numbers["local_size"], numbers["cross_size"]
    if local_size > size:
        raise ValueError(f"local_size={local_size}: more ranks on this machine than in the job (size={size})")
    if cross_size > size:
        raise ValueError(f"cross_size={cross_size}: more machines than ranks (size={size})")
    if numbers["rank"] == 0 and (numbers["local_rank"] or numbers["cross_rank"]):
        name = "local_rank" if numbers["local_rank"] else "cross_rank"
        raise ValueError(f"{name}={numbers[name]}: rank 0 must be the first rank of the first machine")
    if local_size == size and cross_size > 1:
        raise ValueError(f"cross_size={cross_size}: all {size} ranks are on this machine (local_size={local_size})")


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
