"""Which launcher started this process, and which rank is it? One table, tried in order, and one reader.

Each row names what a launcher sets for a rank and nothing else. Three launchers do not say all six numbers: MPI leaves
out the machine's, Slurm gives a list of tasks per node, TensorFlow one JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from det_core._env import Environment
from det_core._slurm import expand_counts, expand_nodes

NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
"""The rank arguments of a DistributedContext, in the order of the tables below."""
_Launch = Mapping[str, str]


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks, as its launcher gave it.

    Attributes:
        launcher: who started this process, as a person knows it ("torchrun").
        line: the expression that makes the DistributedContext of this launcher.
        job: what tells this job's ranks from those of another job on the same machine.
        numbers: the rank arguments of a DistributedContext.
        chief_ip: the chief's address, where the launcher tells it.
        machine_is_known: False: ``cross_rank`` and ``cross_size`` are a guess, and the ranks have to ask each other.
    """

    launcher: str
    line: str
    job: tuple[str, ...]
    numbers: dict[str, Any]
    chief_ip: str | None = None
    machine_is_known: bool = True


@dataclass(frozen=True)
class Launcher:
    """How the processes of one launcher are recognised and read.

    Attributes:
        name: as in ``DistributedContext.from_NAME``.
        command: as a person knows it.
        line: the expression that makes the DistributedContext.
        marks: the variables that no other launcher sets together: where all of them are, it was this one.
        variables: those that a rank needs; without ``read`` the six numbers, in order.
        job: those that tell one job from another, as far as they are set.
        chief: reads the chief's address, where the launcher tells it.
        read: reads the six numbers, where they are not simply the variables.
        machine_is_known: as in :class:`Ranks`.
        also: what has to hold beside the marks.
    """

    name: str
    command: str
    line: str
    marks: tuple[str, ...]
    variables: tuple[str, ...]
    job: tuple[str, ...] = ()
    chief: Callable[[_Launch], str | None] | None = None
    read: Callable[[_Launch, tuple[str, ...]], tuple[int, ...]] | None = None
    machine_is_known: bool = True
    also: Callable[[_Launch], bool] | None = None

    def started(self, launch: _Launch) -> bool:
        """Whether this launcher started the process."""
        return all(map(launch.get, self.marks)) and (self.also is None or self.also(launch))

    def ranks(self, launch: _Launch) -> Ranks:
        """Read the ranks.

        Raises:
            ValueError: variables are missing or are no numbers; the message names them.
        """
        if missing := [name for name in self.variables if not launch.get(name)]:
            raise ValueError(
                f"not set: {', '.join(missing)}. {self.command} sets them for each process: start the script with it, "
                "or give the ranks yourself: DistributedContext(rank=…, size=…, …). DistributedContext.detect() finds "
                "any launcher, and is one rank where there is none"
            )
        numbers = dict(zip(NUMBERS, (self.read or numbers_of)(launch, self.variables), strict=True))
        chief = self.chief(launch) if self.chief else None
        return Ranks(self.command, self.line, self.job_of(launch), numbers, chief, self.machine_is_known)

    def job_of(self, launch: _Launch) -> tuple[str, ...]:
        """What tells the job of this process from others on the machine."""
        return tuple(f"{name}={launch[name]}" for name in self.job if launch.get(name))


def launched_ranks(environment: Environment) -> Ranks | None:
    """The ranks that the environment says there are; None: this process is alone."""
    found = find(environment.launch)
    ranks = None if found is None else found.ranks(environment.launch)
    return ranks if ranks is not None and ranks.numbers["size"] > 1 else None


def find(launch: _Launch) -> Launcher | None:
    """The first launcher of the table that is recognised."""
    return next((launcher for launcher in LAUNCHERS if launcher.started(launch)), None)


def launcher_called(name: str) -> Launcher:
    """The (first) launcher of that name."""
    return next(launcher for launcher in LAUNCHERS if launcher.name == name)


def numbers_of(launch: _Launch, names: tuple[str, ...]) -> tuple[int, ...]:
    """The values of variables that are numbers.

    Raises:
        ValueError: one is none.
    """
    for name in names:
        if not re.fullmatch(r"\d+", launch[name]):
            raise ValueError(f"{name}={launch[name]!r}: expected a number")
    return tuple(int(launch[name]) for name in names)


# MPI


def _mpi(launch: _Launch, names: tuple[str, ...]) -> tuple[int, ...]:
    """MPI's four numbers, and a guess at the machine: as if all had as many ranks as this one, in blocks.

    The guess never claims the chief's machine (number 0) wrongly. A rank that is its own local rank has all lower ones
    beside it; of any other one it is not sure.
    """
    rank, size, local_rank, local_size = numbers_of(launch, names)
    if local_size >= size:
        return rank, size, local_rank, local_size, 0, 1
    machine, machines = rank // max(local_size, 1), max(2, -(-size // max(local_size, 1)))
    if machine == 0 and rank != local_rank:
        machine = 1
    return rank, size, local_rank, local_size, machine, machines


def number_machines(places: Sequence[tuple[str, int, int]]) -> list[int]:
    """Which machine each rank is on, in the order of their lowest ranks.

    Args:
        places: of each rank its host's name, its local rank and local size.

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
        "MPI does not tell a rank the number of its machine, and it cannot be computed: neither the host names nor the "
        f"order of the ranks agrees with how many ranks each machine is said to have: {places!r}. Give the ranks "
        "yourself: DistributedContext(rank=…, size=…, …)"
    )


# Slurm


def _slurm(launch: _Launch, names: tuple[str, ...]) -> tuple[int, ...]:
    rank, local_rank, node, size, nodes = numbers_of(launch, names[:5])
    tasks = expand_counts(launch[names[5]])
    if node >= len(tasks):
        raise ValueError(f"{names[5]}={launch[names[5]]!r} has no entry for {names[2]}={node}")
    return rank, size, local_rank, tasks[node], node, nodes


def _slurm_chief(launch: _Launch) -> str | None:
    return next(iter(expand_nodes(launch.get("SLURM_STEP_NODELIST") or launch.get("SLURM_JOB_NODELIST") or "")), None)


# TensorFlow


def read_tf_config(text: str) -> tuple[int, list[str]]:
    """Which worker this process is, and the ``HOST:PORT`` of each, from the value of ``TF_CONFIG``.

    Raises:
        ValueError: it is not JSON of TensorFlow's form, or this process is no worker.
    """
    try:
        found = json.loads(text)
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
    return index, addresses


def _is_worker_of_several(launch: _Launch) -> bool:
    """Whether ``TF_CONFIG`` says that this process is one of several workers."""
    try:
        return len(read_tf_config(launch.get("TF_CONFIG", ""))[1]) > 1
    except ValueError:
        return False


def _tensorflow(launch: _Launch, names: tuple[str, ...]) -> tuple[int, ...]:
    """One process on each machine."""
    index, addresses = read_tf_config(launch[names[0]])
    return index, len(addresses), 0, 1, index, len(addresses)


def _tensorflow_chief(launch: _Launch) -> str | None:
    return read_tf_config(launch["TF_CONFIG"])[1][0].rpartition(":")[0].strip("[]")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, expected an object")
    return value


# The table

_TORCH_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_MPI_JOB = ("PMIX_NAMESPACE", "PMI_ID", "PMI_PORT", "PMI_JOBID")
_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name.upper()}" for name in NUMBERS[:4])
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_CONTEXT = "core.DistributedContext."

LAUNCHERS = (
    Launcher(
        "torch_distributed", "torchrun", f"{_CONTEXT}from_torch_distributed()",
        marks=("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        variables=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        job=_TORCH_JOB, chief=lambda launch: launch.get("MASTER_ADDR"),
    ),
    Launcher(
        "deepspeed", "deepspeed", f"{_CONTEXT}from_deepspeed()",
        marks=("RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK"),
        variables=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        job=_TORCH_JOB, chief=lambda launch: launch.get("MASTER_ADDR"),
    ),
    Launcher(
        "horovod", "horovodrun", f"{_CONTEXT}from_horovod(hvd)",
        marks=("HOROVOD_RANK", "HOROVOD_SIZE"), variables=tuple(f"HOROVOD_{name.upper()}" for name in NUMBERS),
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", *_MPI_JOB, *_SLURM_JOB),
    ),
    Launcher(  # its workers are on machines of their own, and meet at the chief's address and port: no name of a job
        "tensorflow", "TensorFlow's launcher", f"{_CONTEXT}from_tf_config()[0]",
        marks=("TF_CONFIG",), variables=("TF_CONFIG",), chief=_tensorflow_chief, read=_tensorflow,
        also=_is_worker_of_several,
    ),
    *(
        Launcher(
            "mpi", "mpirun", f"{_CONTEXT}from_mpi()",
            marks=names, variables=names, job=_MPI_JOB, read=_mpi, machine_is_known=False,
        )
        for names in (_OPEN_MPI, _HYDRA)
    ),
    Launcher(
        "slurm", "srun", f"{_CONTEXT}from_slurm()",
        marks=("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        variables=(
            "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
        job=_SLURM_JOB, chief=_slurm_chief, read=_slurm,
    ),
)  # fmt: skip
"""In the order in which they are tried: a launcher that another one started comes first."""
