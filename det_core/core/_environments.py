"""Which launcher started this process, and as which rank: a table of their variables, tried in order, and one reader.

Torchrun, deepspeed and horovodrun set the six numbers of a rank. MPI and Ray Train leave out the machine's two, Slurm
gives a list of tasks per node, TensorFlow one JSON text: each of these has a function.

Variables that tell of several processes, but not which of them this one is, are an error: alone, each would be rank 0
of a run of its own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from det_core._env import Environment
from det_core._slurm import expand_counts, expand_nodes
from det_core.errors import LauncherNotFound

RANK_FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
"""The rank arguments of a DistributedContext, in the order of the table."""
_Launch = Mapping[str, str]
_Place = tuple[list[int], str | None]
"""The six numbers, and the chief's address where the launcher tells it."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks, as ``launcher`` gave it: ``numbers`` are a DistributedContext's."""

    launcher: Launcher
    numbers: dict[str, Any]
    chief_ip: str | None


@dataclass(frozen=True)
class Launcher:
    """What one launcher sets for each process.

    Attributes:
        command: as a person knows it.
        constructor: the class method of DistributedContext that reads it, as a script calls it.
        required_variables: the variables that no other launcher sets together: where all of them are, it was this one.
        variables: those that a rank needs.
        job: those that tell one job on a machine from another, as far as they are set.
        read: reads the numbers from ``variables``.
        also: what has to hold beside the required_variables.
    """

    command: str
    constructor: str
    required_variables: tuple[str, ...]
    variables: tuple[str, ...]
    job: tuple[str, ...]
    read: Callable[[_Launch, tuple[str, ...]], _Place]
    also: Callable[[_Launch], bool] = lambda _: True

    @property
    def line(self) -> str:
        """The expression that makes the DistributedContext."""
        return f"core.DistributedContext.{self.constructor}"

    @property
    def knows_machines(self) -> bool:
        """Whether ``cross_rank`` and ``cross_size`` are told. If not they are a guess, and the ranks ask each other."""
        return self.read is not _four

    def started(self, launch: _Launch) -> bool:
        """Whether this launcher started the process."""
        return all(map(launch.get, self.required_variables)) and self.also(launch)

    def ranks(self, launch: _Launch) -> Ranks:
        """Read the ranks.

        Raises:
            LauncherNotFound: If variables are missing; the message names them.
            ValueError: If one is not a number.
        """
        if missing := [name for name in self.variables if not launch.get(name)]:
            raise LauncherNotFound(
                f"not set: {', '.join(missing)}. {self.command} sets them for each process: start the script with it, "
                "or give the ranks yourself: DistributedContext(rank=…, size=…, …). DistributedContext.detect() finds "
                "any launcher, and is one rank where there is none"
            )
        numbers, chief_ip = self.read(launch, self.variables)
        return Ranks(self, dict(zip(RANK_FIELDS, numbers, strict=True)), chief_ip)

    def job_of(self, launch: _Launch) -> tuple[str, ...]:
        """What tells the job of this process from others on the machine."""
        return tuple(f"{name}={launch[name]}" for name in self.job if launch.get(name))


def detect_launcher(launch: _Launch) -> Launcher | None:
    """Return the first launcher of the table that is recognised; None: this process is alone.

    Raises:
        ValueError: If variables tell that it is one of several, but not which.
    """
    for launcher in LAUNCHERS:
        if launcher.started(launch):
            return launcher
    for evidence in _SEVERAL:
        if evidence.applies(launch):
            raise ValueError(evidence.describe(launch))
    return None


def launcher_for(constructor: str, launch: _Launch) -> Launcher:
    """The launcher whose ``constructor`` begins so: of several the one that started this process, else the first."""
    those = [each for each in LAUNCHERS if each.constructor.startswith(constructor)]
    return next((each for each in those if each.started(launch)), those[0])


def launched_ranks(environment: Environment) -> Ranks | None:
    """The ranks that the environment says there are; None: this process is alone."""
    found = detect_launcher(environment.launch)
    ranks = None if found is None else found.ranks(environment.launch)
    return ranks if ranks is not None and ranks.numbers["size"] > 1 else None


def check_process_group(size: int) -> None:
    """Raise ValueError if ``torch.distributed`` is initialised with another number of ranks; torch is not imported."""
    distributed: Any = sys.modules.get("torch.distributed")
    # without support for it, or while torch is being imported, there is no such function
    if not getattr(distributed, "is_initialized", lambda: False)():
        return
    torch_size = distributed.get_world_size()
    if torch_size != size:
        raise ValueError(
            f"torch.distributed was initialised with {torch_size} ranks, but det_core would have {size}: start the "
            "script with a launcher, such as torchrun, that sets all variables of a rank, or give the ranks yourself, "
            f"on one machine: core.DistributedContext(rank=RANK, size={torch_size}, local_rank=RANK, "
            f"local_size={torch_size}, cross_rank=0, cross_size=1)"
        )


@dataclass(frozen=True)
class _Evidence:
    """Variables of one kind of launcher that tell of several processes.

    Attributes:
        rank: number of this process.
        size: how many there are.
        beside: variables that tell of several together with ``rank``, if ``size`` is not set.
        needed: what else a rank needs.
    """

    rank: str
    size: str
    beside: tuple[str, ...]
    needed: tuple[str, ...]

    def applies(self, launch: _Launch) -> bool:
        """Return whether this process is one of several."""
        # LOCAL_RANK alone does not: a script may choose its GPU by it
        if self.rank != "LOCAL_RANK" and _is_beyond(launch.get(self.rank), 0):
            return True
        if _is_beyond(launch.get(self.size), 1):
            return True
        return not launch.get(self.size) and all(map(launch.get, (self.rank, *self.beside)))

    def describe(self, launch: _Launch) -> str:
        """Return what is set, what is missing, and what to do."""
        variables = (self.rank, self.size, *self.beside, *self.needed)
        given = ", ".join(f"{name}={launch[name]}" for name in variables if launch.get(name))
        missing = ", ".join(name for name in (self.rank, self.size, *self.needed) if not launch.get(name))
        local = " (number of this process on its machine, and how many run there: 0 and 1 where it is the only one)"
        return (
            f"this process is one of several ({given}), but which cannot be told; not set: {missing}. Start the "
            f"script with a launcher that sets them, or set them for each process{local * ('LOCAL_RANK' in missing)}, "
            "or give the ranks yourself: core.DistributedContext(rank=…, size=…, …). If it is alone, "
            f"unset {self.rank} and {self.size}"
        )


def _is_beyond(text: str | None, limit: int) -> bool:
    return text is not None and re.fullmatch(r"\d+", text) is not None and int(text) > limit


def _numbers(launch: _Launch, names: tuple[str, ...]) -> list[int]:
    for name in names:
        if not re.fullmatch(r"\d+", launch[name]):
            raise ValueError(f"{name}={launch[name]!r}: expected a number")
    return [int(launch[name]) for name in names]


def _six(launch: _Launch, names: tuple[str, ...]) -> _Place:
    return _numbers(launch, names), None


def _six_of_torch(launch: _Launch, names: tuple[str, ...]) -> _Place:
    return _numbers(launch, names), launch.get("MASTER_ADDR")


def _four(launch: _Launch, names: tuple[str, ...]) -> _Place:
    """Return the four numbers there are, and a guess at the machine: as if all had as many ranks, in blocks.

    The guess never claims the chief's machine (number 0) wrongly. A rank that is its own local rank has all lower ones
    beside it; of any other one it is not sure.
    """
    rank, size, local_rank, local_size = numbers = _numbers(launch, names)
    chief_ip = launch.get("MASTER_ADDR")
    if local_size >= size:
        return [*numbers, 0, 1], chief_ip
    machine, machines = rank // max(local_size, 1), max(2, -(-size // max(local_size, 1)))
    if machine == 0 and rank != local_rank:
        machine = 1
    return [*numbers, machine, machines], chief_ip


def assign_nodes(places: Sequence[tuple[str, int, int]]) -> list[int]:
    """Which machine each rank is on, numbered by their lowest ranks, from each rank's host, local rank and local size.

    Raises:
        ValueError: neither the host names nor blocks of ranks agree with the local sizes.
    """
    names = list(dict.fromkeys(host for host, _, _ in places))
    by_name = [names.index(host) for host, _, _ in places]
    in_blocks: list[int] = []
    for _, local_rank, _ in places:  # containers may have one name for all
        in_blocks.append((in_blocks[-1] if in_blocks else -1) + (local_rank == 0))
    for machines in (by_name, in_blocks):
        found: dict[int, list[tuple[int, int]]] = {}
        for machine, (_, local_rank, local_size) in zip(machines, places, strict=True):
            found.setdefault(machine, []).append((local_rank, local_size))
        if all(sorted(ranks) == [(i, len(ranks)) for i in range(len(ranks))] for ranks in found.values()):
            return machines
    raise ValueError(
        "no variable tells a rank the number of its machine, and it cannot be computed: neither the host names nor the "
        f"order of the ranks agrees with how many ranks each machine is said to have: {places!r}. Give the ranks "
        "yourself: DistributedContext(rank=…, size=…, …)"
    )


def _slurm(launch: _Launch, names: tuple[str, ...]) -> _Place:
    rank, local_rank, node, size, nodes = _numbers(launch, names[:5])
    tasks = expand_counts(launch[names[5]])
    if node >= len(tasks):
        raise ValueError(f"{names[5]}={launch[names[5]]!r} has no entry for {names[2]}={node}")
    hosts = expand_nodes(launch.get("SLURM_STEP_NODELIST") or launch.get("SLURM_JOB_NODELIST") or "")
    return [rank, size, local_rank, tasks[node], node, nodes], next(iter(hosts), None)


def _tensorflow(launch: _Launch, names: tuple[str, ...]) -> _Place:
    """One process on each machine, from JSON: which worker this process is, and the ``HOST:PORT`` of each."""
    try:
        found = json.loads(launch[names[0]])
    except ValueError as e:
        raise ValueError(f"TF_CONFIG is not JSON: {e}") from e
    task = _object(_object(found, "TF_CONFIG").get("task"), "TF_CONFIG's task")
    addresses = _object(found.get("cluster"), "TF_CONFIG's cluster").get("worker")
    kind, index = task.get("type"), task.get("index")
    if kind != "worker":
        raise ValueError(f"TF_CONFIG: this process is of type {kind!r}; only a worker has a rank")
    if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
        raise ValueError(f"TF_CONFIG: cluster.worker is {addresses!r}, expected a list of HOST:PORT")
    if not isinstance(index, int) or not 0 <= index < len(addresses):
        raise ValueError(f"TF_CONFIG: task.index is {index!r}, and there are {len(addresses)} workers")
    return [index, len(addresses), 0, 1, index, len(addresses)], addresses[0].rpartition(":")[0].strip("[]")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, expected an object")
    return value


def _is_worker_of_several(launch: _Launch) -> bool:
    try:
        return _tensorflow(launch, ("TF_CONFIG",))[0][1] > 1
    except ValueError:
        return False


_TORCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_MPI = ("PMIX_NAMESPACE", "PMI_ID", "PMI_PORT", "PMI_JOBID")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_GLOO = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_LOCAL_OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name.upper()}" for name in RANK_FIELDS[:4])
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

LAUNCHERS = (
    Launcher(
        "torchrun", "from_torch_distributed()", ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        _TORCH, _six_of_torch,
    ),
    Launcher(
        "deepspeed", "from_deepspeed()", ("RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK"),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        _TORCH, _six_of_torch,
    ),
    Launcher(
        "horovodrun", "from_horovod(hvd)", ("HOROVOD_RANK", "HOROVOD_SIZE"),
        tuple(f"HOROVOD_{name.upper()}" for name in RANK_FIELDS),
        (*_GLOO, *_MPI, *_SLURM), _six,
    ),
    Launcher(  # its workers are on machines of their own, and meet at the chief's address and port: no name of a job
        "TensorFlow's launcher", "from_tf_config()[0]", ("TF_CONFIG",), ("TF_CONFIG",),
        (), _tensorflow, _is_worker_of_several,
    ),
    Launcher("Ray Train", "from_torch_distributed()", _LOCAL_OF_TORCH, _LOCAL_OF_TORCH, _TORCH, _four),
    Launcher("mpirun", "from_mpi()", _OPEN_MPI, _OPEN_MPI, _MPI, _four),
    Launcher("mpirun", "from_mpi()", _HYDRA, _HYDRA, _MPI, _four),
    Launcher(
        "srun", "from_slurm()", ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES",
         "SLURM_STEP_TASKS_PER_NODE"),
        _SLURM, _slurm,
    ),
)  # fmt: skip
"""In the order in which they are tried: a launcher that another one started comes first."""

_SEVERAL = (
    _Evidence("RANK", "WORLD_SIZE", ("MASTER_ADDR",), _LOCAL_OF_TORCH[2:]),
    _Evidence("LOCAL_RANK", "WORLD_SIZE", ("MASTER_ADDR",), ("RANK", "LOCAL_WORLD_SIZE")),
    _Evidence("HOROVOD_RANK", "HOROVOD_SIZE", (), tuple(f"HOROVOD_{name.upper()}" for name in RANK_FIELDS[2:])),
    _Evidence(_OPEN_MPI[0], _OPEN_MPI[1], (), _OPEN_MPI[2:]),
    _Evidence(_HYDRA[0], _HYDRA[1], (), _HYDRA[2:]),
    _Evidence(  # a batch script has a SLURM_PROCID too, but is no task of a step
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_STEP_ID",), ("SLURM_STEP_ID",)
    ),
)
"""Variables of a job of several processes where no launcher is recognised; ``MASTER_ADDR`` alone is none."""
