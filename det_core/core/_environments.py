"""Who started this process, and which rank is it? One small detector per launcher, tried in order.

Each reads what its launcher sets for a rank and nothing else:

======================  ==========================================================================================
torch distributed       torchrun: RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
deepspeed               RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE
horovod                 HOROVOD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE,CROSS_RANK,CROSS_SIZE}
tensorflow              TF_CONFIG, where it names several workers
mpi                     OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}, or PMI_{RANK,SIZE} with MPI_LOCAL…
slurm                   SLURM_{PROCID,LOCALID,NODEID} and the sizes of a step that srun started
======================  ==========================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from det_core._env import Environment
from det_core._slurm import expand_counts, expand_nodes
from det_core.core._tf_config import is_worker_of_several, ranks_of


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks, as its launcher gave it."""

    launcher: str
    """Who started this process, as a person knows it ("torchrun")."""
    line: str
    """The expression that makes the DistributedContext of this launcher."""
    job: tuple[str, ...]
    """What tells this job's ranks from those of another job on the same machine."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    chief_ip: str | None = None
    """The chief's address, where the launcher tells it."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The rank arguments of a DistributedContext."""
        return {name: getattr(self, name) for name in _NUMBERS}


@dataclass(frozen=True)
class Detector:
    """How one launcher is recognised and read."""

    name: str
    launcher: str
    line: str
    needs: tuple[str, ...]
    """The variables that a rank of this launcher has, all of them."""
    marks: tuple[str, ...]
    """The variables that no other launcher sets together: where all of them are, it was this one."""
    job: tuple[str, ...]
    """The variables, those of them that are set, that tell one job from another."""
    hint: str
    """How to start the script so that the variables are there."""
    read: Callable[[Mapping[str, str]], dict[str, Any]]
    """The rank numbers, and the chief's address if the launcher tells it."""
    fits: Callable[[Mapping[str, str]], bool] = lambda launch: True
    """What else has to hold of the marks."""

    def present(self, launch: Mapping[str, str]) -> bool:
        """Whether this launcher started the process."""
        return all(launch.get(name) for name in self.marks) and self.fits(launch)

    def ranks(self, launch: Mapping[str, str]) -> Ranks:
        """Read the ranks.

        Raises:
            ValueError: variables are missing or are no numbers; the message names them.
        """
        if missing := [name for name in self.needs if not launch.get(name)]:
            raise ValueError(
                f"not set: {', '.join(missing)}. {self.launcher} sets them for each process: start the script with "
                f"{self.hint}, or give the ranks yourself: DistributedContext(rank=…, size=…, …)"
            )
        return Ranks(launcher=self.launcher, line=self.line, job=self.job_of(launch), **self.read(launch))

    def job_of(self, launch: Mapping[str, str]) -> tuple[str, ...]:
        """What tells the job of this process from others on the machine."""
        return tuple(f"{name}={launch[name]}" for name in self.job if launch.get(name))


def launched_ranks(environment: Environment) -> Ranks | None:
    """The ranks that the environment says there are; None: this process is alone."""
    detector = find(environment.launch)
    ranks = None if detector is None else detector.ranks(environment.launch)
    return ranks if ranks is not None and ranks.size > 1 else None


def find(launch: Mapping[str, str]) -> Detector | None:
    """The first launcher of the table that is recognised."""
    return next((d for d in DETECTORS if d.present(launch)), None)


def detector(name: str) -> Detector:
    """The launcher of that name."""
    return next(d for d in DETECTORS if d.name == name)


def _number(launch: Mapping[str, str], name: str) -> int:
    text = launch[name]
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name}={text!r}: expected a number")
    return int(text)


def _six(names: tuple[str, ...], chief: str | None = None) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """A reader of six variables, in the order of the arguments, and of the chief's address."""

    def read(launch: Mapping[str, str]) -> dict[str, Any]:
        numbers: dict[str, Any] = {a: _number(launch, name) for a, name in zip(_NUMBERS, names, strict=True)}
        return {**numbers, "chief_ip": launch.get(chief) if chief else None}

    return read


def _mpi(names: tuple[str, ...]) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """A reader of MPI's four variables; the number of the machine is computed."""

    def read(launch: Mapping[str, str]) -> dict[str, Any]:
        rank, size, local_rank, local_size = (_number(launch, name) for name in names)
        if not local_size or size % local_size:
            raise ValueError(
                f"{names[1]}={size} ranks, {names[3]}={local_size} of them on this machine: MPI does not tell a rank "
                "the number of its machine, and it can only be computed when all machines have as many ranks. "
                "Give the ranks yourself: DistributedContext(rank=…, size=…, …)"
            )
        machine = (rank // local_size, size // local_size)
        return dict(zip(_NUMBERS, (rank, size, local_rank, local_size, *machine), strict=True))

    return read


def _slurm(launch: Mapping[str, str]) -> dict[str, Any]:
    rank, local_rank, cross_rank, size, cross_size = (_number(launch, name) for name in _SLURM)
    tasks = expand_counts(launch["SLURM_STEP_TASKS_PER_NODE"])
    if cross_rank >= len(tasks):
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={launch['SLURM_STEP_TASKS_PER_NODE']!r} has no entry for "
            f"SLURM_NODEID={cross_rank}"
        )
    numbers = (rank, size, local_rank, tasks[cross_rank], cross_rank, cross_size)
    chief = first_host(launch.get("SLURM_STEP_NODELIST") or launch.get("SLURM_JOB_NODELIST") or "")
    return {**dict(zip(_NUMBERS, numbers, strict=True)), "chief_ip": chief}


def first_host(nodes: str) -> str | None:
    """The first host of a Slurm node list: ``"gpu[03-05,9],cpu1"`` is ``"gpu03"``."""
    return next(iter(expand_nodes(nodes)), None)


_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_HOROVOD = tuple(f"HOROVOD_{name.upper()}" for name in _NUMBERS)
_OMPI = tuple(f"OMPI_COMM_WORLD_{name.upper()}" for name in _NUMBERS[:4])
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
_TORCH_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_MPI_JOB = ("PMIX_NAMESPACE", "PMI_ID", "PMI_PORT", "PMI_JOBID")
_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_HOROVOD_JOB = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", *_MPI_JOB, *_SLURM_JOB)

DETECTORS = (
    Detector(
        name="torch_distributed",
        launcher="torchrun",
        line="core.DistributedContext.from_torch_distributed()",
        needs=_TORCH,
        marks=("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        job=_TORCH_JOB,
        hint="python -m det_core.launch.torch_distributed (or torchrun)",
        read=_six(_TORCH, chief="MASTER_ADDR"),
    ),
    Detector(
        name="deepspeed",
        launcher="deepspeed",
        line="core.DistributedContext.from_deepspeed()",
        needs=_DEEPSPEED,
        marks=("RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK"),
        job=_TORCH_JOB,
        hint="the deepspeed launcher",
        read=_six(_DEEPSPEED, chief="MASTER_ADDR"),
    ),
    Detector(
        name="horovod",
        launcher="horovodrun",
        line="core.DistributedContext.from_horovod(hvd)",
        needs=_HOROVOD,
        marks=("HOROVOD_RANK", "HOROVOD_SIZE"),
        job=_HOROVOD_JOB,
        hint="horovodrun",
        read=_six(_HOROVOD),
    ),
    Detector(
        name="tensorflow",
        launcher="TensorFlow's launcher",
        line="core.DistributedContext.from_tf_config()[0]",
        needs=("TF_CONFIG",),
        marks=("TF_CONFIG",),
        job=(),  # its workers are on machines of their own, and meet at the chief's address and port
        hint="python -m det_core.launch.tensorflow",
        read=ranks_of,
        fits=is_worker_of_several,
    ),
    *(
        Detector(
            name="mpi",
            launcher="mpirun",
            line="core.DistributedContext.from_mpi()",
            needs=names,
            marks=names,
            job=_MPI_JOB,
            hint="mpirun",
            read=_mpi(names),
        )
        for names in (_OMPI, _PMI)
    ),
    Detector(
        name="slurm",
        launcher="srun",
        line="core.DistributedContext.from_slurm()",
        needs=(*_SLURM, "SLURM_STEP_TASKS_PER_NODE"),
        marks=("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        job=_SLURM_JOB,
        hint="srun",
        read=_slurm,
    ),
)
