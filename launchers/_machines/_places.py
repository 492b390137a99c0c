"""How a launcher finds out where it runs: one small class per kind of surroundings, asked in order.

==================  =================================================================================
``Hostfile``        ``--hostfile FILE`` or ``--hosts A:2,B:2``
``Machines``        ``--nnodes N --node-rank R --master-addr A``
``Allocation``      a master's: slots and addresses stand in its files
``OpenMpi``         ``mpirun`` has started this launcher, once on each machine
``Slurm``           a job of Slurm: its nodes, and its tasks or GPUs on them
``Pmi``             as ``OpenMpi``, for MPICH and what descends from it
``Bare``            none of these: this machine
==================  =================================================================================
"""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from det_core._env import Environment
from det_core._info import get_cluster_info
from det_core._slurm import expand_counts, expand_nodes

from .._words._options import UsageError
from ._hosts import Host, read_hostfile, read_hosts
from ._place import PORT, Place, index_of_this_machine
from ._slots import ONE, gpus


@dataclass(frozen=True)
class Surroundings(ABC):
    """What a launcher knows when it asks where it runs."""

    asked: argparse.Namespace
    """Its options."""
    environment: Environment
    program: str
    """The framework's launcher, for messages."""
    one_for_all: bool
    """Whether one of it starts the ranks of all machines; else one runs on each."""

    @abstractmethod
    def detect(self) -> bool:
        """Whether this kind is at hand."""

    @abstractmethod
    def place(self) -> Place:
        """Where the job runs.

        Raises:
            UsageError: options or variables contradict each other, or some are missing.
        """

    @property
    def launch(self) -> Mapping[str, str]:
        """The variables that frameworks and schedulers set."""
        return self.environment.launch

    def slots(self) -> tuple[int, str]:
        """How many ranks this machine gets if nothing else tells, and a notice."""
        if (asked := self.asked.nproc_per_node or gpus(self.environment)) > 0:
            return int(asked), ""
        return 1, ONE

    def count(self, name: str) -> int:
        """The number in a variable."""
        text = self.launch[name]
        if not text.isdigit():
            raise UsageError(f"{name}={text!r}: expected a number")
        return int(text)


class Hostfile(Surroundings):
    """Hosts named on the command line."""

    def detect(self) -> bool:
        """Whether there are such options."""
        return self.asked.hostfile is not None or self.asked.hosts is not None

    def place(self) -> Place:
        """The hosts, and this machine among them."""
        asked = self.asked
        if asked.hostfile is not None and asked.hosts is not None:
            raise UsageError("--hostfile and --hosts both name the hosts: give one of them")
        hosts = (
            read_hosts(asked.hosts, asked.nproc_per_node)
            if asked.hostfile is None
            else read_hostfile(asked.hostfile, asked.nproc_per_node)
        )
        where = f"--hosts {asked.hosts}" if asked.hostfile is None else asked.hostfile
        if asked.nnodes not in (None, len(hosts)):
            raise UsageError(f"--nnodes {asked.nnodes}, but {where} names {len(hosts)} hosts")
        rank = asked.node_rank
        if rank is None:
            rank = 0 if self.one_for_all or len(hosts) == 1 else index_of_this_machine(hosts, where)
        if rank >= len(hosts):
            raise UsageError(f"--node-rank {rank}: {where} names {len(hosts)} hosts, of which 0 is the first")
        return Place(where, hosts, rank, asked.master_port or PORT)


class Machines(Surroundings):
    """A number of machines, each with a launcher of its own."""

    def detect(self) -> bool:
        """Whether a number of them is given."""
        return self.asked.nnodes is not None

    def place(self) -> Place:
        """So many machines like this one."""
        asked = self.asked
        if asked.nnodes == 1:
            return Bare(asked, self.environment, self.program, self.one_for_all).place()
        if self.one_for_all:
            raise UsageError(
                f"--nnodes {asked.nnodes}: {self.program} starts the ranks of all machines from here, "
                "so name them: --hosts A:2,B:2 or --hostfile FILE"
            )
        if asked.node_rank is None:
            raise UsageError(f"--nnodes {asked.nnodes}: say which of them this is, from 0 on, with --node-rank R")
        if asked.node_rank >= asked.nnodes:
            raise UsageError(f"--node-rank {asked.node_rank} is not below --nnodes {asked.nnodes}")
        if asked.master_addr is None:
            raise UsageError(f"--nnodes {asked.nnodes}: give the address of the first one with --master-addr HOST")
        slots, notice = self.slots()
        hosts = _unnamed(asked.nnodes, slots, asked.master_addr)
        return Place("--nnodes", hosts, asked.node_rank, asked.master_port or PORT, known=False, notice=notice)


class Allocation(Surroundings):
    """An allocation of a master of the wire contract's kind."""

    def detect(self) -> bool:
        """Whether its files are there."""
        return get_cluster_info() is not None

    def place(self) -> Place:
        """Its containers."""
        info = get_cluster_info()
        assert info is not None
        addresses, counts = info.container_addrs, info.container_slot_counts
        own, notice = self.slots()
        if info.slot_ids:
            notice = ""
        slots = [self.asked.nproc_per_node or count or own for count in counts]
        hosts = tuple(Host(a, n) for a, n in zip(addresses, slots, strict=True))
        meet = self.asked.master_port or int(os.environ.get("C10D_PORT") or 29400)
        return Place(f"allocation {info.allocation_id}", hosts, info.container_rank, meet, notice=notice)


class OpenMpi(Surroundings):
    """Launchers that somebody's ``mpirun`` has started, one on each machine."""

    rank, size, local_size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"

    def detect(self) -> bool:
        """Whether it has."""
        return bool(self.launch.get(self.rank) and self.launch.get(self.size))

    def place(self) -> Place:
        """As many machines as there are launchers."""
        if self.count(self.size) > 1 and self.launch.get(self.local_size, "1") != "1":
            raise UsageError(
                f"mpirun started {self.launch[self.local_size]} launchers on this machine, and each would start all "
                "ranks of it: have it start one on each (mpirun --map-by ppr:1:node), or run the script under "
                "python -m det_core.launch.mpi"
            )
        nodes = self.count(self.size)
        chief = self.asked.master_addr or self.environment.chief_ip
        if nodes > 1 and self.one_for_all:
            raise UsageError(f"mpirun started {nodes} launchers, and one {self.program} starts all ranks: start one")
        if nodes > 1 and not chief:
            raise UsageError("MPI does not tell the address of the first machine: add --master-addr HOST")
        slots, notice = self.slots()
        hosts = _unnamed(nodes, slots, chief or "127.0.0.1")
        meet = self.asked.master_port or PORT
        return Place("mpirun", hosts, self.count(self.rank), meet, known=False, notice=notice)


class Pmi(OpenMpi):
    """The same under MPICH, Intel MPI, or ``srun --mpi=pmi2``."""

    rank, size, local_size = "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"


class Slurm(Surroundings):
    """A job of Slurm: in a step that ``srun`` started, or in the script of ``sbatch``."""

    def detect(self) -> bool:
        """Whether this is one."""
        return bool(self.launch.get("SLURM_JOB_ID") and self.launch.get("SLURM_JOB_NODELIST"))

    def place(self) -> Place:
        """Its nodes."""
        step = bool(self.launch.get("SLURM_STEP_ID") and self.launch.get("SLURM_STEP_TASKS_PER_NODE"))
        try:
            nodes = expand_nodes(self.launch["SLURM_JOB_NODELIST"])
            if step:
                nodes = expand_nodes(self.launch.get("SLURM_STEP_NODELIST", ""), "SLURM_STEP_NODELIST") or nodes
            tasks = self._tasks("SLURM_STEP_TASKS_PER_NODE" if step else "SLURM_TASKS_PER_NODE", len(nodes))
        except ValueError as e:
            raise UsageError(str(e)) from e
        self._check(step, nodes, tasks)
        counts = [1] * len(nodes) if step else tasks
        own, notice = self.slots()
        if self.asked.nproc_per_node:
            counts = [self.asked.nproc_per_node] * len(nodes)
        elif self.launch.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
            counts = [self.count("SLURM_GPUS_ON_NODE")] * len(nodes)
        elif max(counts) == 1:
            counts = [own] * len(nodes)
        if max(counts) > 1:
            notice = ""
        rank = self.count("SLURM_NODEID") if step and not self.one_for_all else 0
        hosts = tuple(Host(node, slots) for node, slots in zip(nodes, counts, strict=True))
        meet = self.asked.master_port or 20000 + int(self.launch["SLURM_JOB_ID"].strip() or 0) % 10000
        return Place(f"Slurm job {self.launch['SLURM_JOB_ID']}", hosts, rank, meet, notice=notice)

    def _tasks(self, name: str, nodes: int) -> list[int]:
        tasks = expand_counts(self.launch[name], name) if self.launch.get(name) else [1] * nodes
        if len(tasks) != nodes:
            raise ValueError(f"{name}={self.launch[name]!r} is about {len(tasks)} nodes, and there are {nodes}")
        return tasks

    def _check(self, step: bool, nodes: list[str], tasks: list[int]) -> None:
        if step and self.one_for_all and sum(tasks) > 1:
            raise UsageError(
                f"srun started {sum(tasks)} launchers, and one {self.program} starts all ranks: run the launcher "
                "itself in the batch script, without srun"
            )
        if step and max(tasks) > 1:
            raise UsageError(
                f"srun started {max(tasks)} launchers on a node, and each would start all ranks of it: "
                "srun --ntasks-per-node=1 starts one"
            )
        if not step and not self.one_for_all and len(nodes) > 1:
            raise UsageError(
                f"the job has {len(nodes)} nodes, and this launcher runs on one of them alone: start one on each, "
                "with srun --ntasks-per-node=1 before the command (or use this node alone: --nnodes 1)"
            )


class Bare(Surroundings):
    """This machine."""

    name = "this machine"

    def detect(self) -> bool:
        """It always is."""
        return True

    def place(self) -> Place:
        """This machine alone."""
        slots, notice = self.slots()
        name = "127.0.0.1" if self.asked.master_addr is None else self.asked.master_addr
        return Place(self.name, (Host(name, slots),), 0, self.asked.master_port or PORT, notice=notice)


KINDS: tuple[type[Surroundings], ...] = (Hostfile, Machines, Allocation, OpenMpi, Slurm, Pmi, Bare)


def find_place(asked: argparse.Namespace, environment: Environment, program: str, *, one_for_all: bool) -> Place:
    """Where the job runs, as the first of :data:`KINDS` that is at hand says.

    Args:
        asked: the launcher's options.
        environment: its environment.
        program: the framework's launcher, for messages.
        one_for_all: whether one of it starts the ranks of all machines; else one runs on each.

    Raises:
        UsageError: options or variables contradict each other, or some are missing.
    """
    kinds = (kind(asked, environment, program, one_for_all) for kind in KINDS)
    place = next(kind for kind in kinds if kind.detect()).place()
    if asked.master_addr is not None and place.several and asked.master_addr != place.chief:
        hosts = (Host(asked.master_addr, place.hosts[0].slots), *place.hosts[1:])
        place = replace(place, hosts=hosts)
    return place if asked.processes is None else _filled(place, asked.processes)


def _filled(place: Place, ranks: int) -> Place:
    """The place with so many ranks in all: the first machines get as many as they have slots."""
    if not place.several and place.where == Bare.name:
        return replace(place, hosts=(replace(place.here, slots=ranks),), notice="")
    if ranks > place.size:
        raise UsageError(f"{ranks} processes are asked for, and {place.where} has {place.size} slots")
    hosts: list[Host] = []
    for host in place.hosts:
        if slots := min(host.slots, ranks - sum(h.slots for h in hosts)):
            hosts.append(replace(host, slots=slots))
    return replace(place, hosts=tuple(hosts), notice="")


def _unnamed(nodes: int, slots: int, chief: str) -> tuple[Host, ...]:
    return (Host(chief, slots), *(Host(f"node{number}", slots) for number in range(1, nodes)))
