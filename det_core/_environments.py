"""Job environments: the variables with which launchers and schedulers number the processes of a job.

One small class per environment, with the methods of Lightning Fabric's ``plugins/environments``. A rank reads all of
its numbers from its class; a launcher of :mod:`det_core.launch` runs once per node and reads the node's from the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from det_core.errors import LauncherNotFound

RANK_FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
"""The rank arguments of a DistributedContext."""
_NODE_LIST = re.compile(r"([^,\[\]]+)(?:\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]([^,\[\]]*))?(?:,|$)")


class JobEnvironment:
    """Numbers of one process, read from the variables of one launcher.

    Args:
        variables: ``Environment.launch`` of the process.

    Attributes:
        command: name of the launcher for its users.
        constructor: expression that makes a DistributedContext from these variables.
        names: variables of rank, size, local rank and local size, then of the node's number and count if there are any.
        required_variables: variables that only this launcher sets together. Defaults to ``names``.
        companions: variables that show several processes if the rank is set beside them and the size is not.
        job_variables: variables that differ between two jobs on one node.
        knows_nodes: whether node numbers are set; otherwise they are guessed, and the ranks exchange host names.
    """

    command: str
    constructor: str
    names: tuple[str, ...]
    required_variables: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    job_variables: tuple[str, ...] = ()
    knows_nodes = True

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    def detect(self) -> bool:
        """Return whether this launcher started the process."""
        return all(map(self.variables.get, self.required_variables or self.names))

    def rank(self) -> int:
        """Return the number of this process in the job."""
        return self.number(self.names[0])

    def size(self) -> int:
        """Return the number of processes of the job."""
        return self.number(self.names[1])

    def local_rank(self) -> int:
        """Return the number of this process on its node."""
        return self.number(self.names[2])

    def local_size(self) -> int:
        """Return the number of processes on this node."""
        return self.number(self.names[3])

    def node_rank(self) -> int:
        """Return the number of this node in the job."""
        return self.number(self.names[4])

    def node_count(self) -> int:
        """Return the number of nodes of the job."""
        return self.number(self.names[5])

    def address(self) -> str | None:
        """Return the chief's address, None if the launcher does not publish it."""
        return self.variables.get("MASTER_ADDR")

    def ranks(self) -> dict[str, Any]:
        """Return the rank arguments of a DistributedContext.

        Raises:
            LauncherNotFound: If variables are missing; the message names them.
            ValueError: If one is not a number.
        """
        names = dict.fromkeys((*self.names, *self.required_variables))
        if missing := [name for name in names if not self.variables.get(name)]:
            hint = ""
            if "LOCAL_RANK" in missing:
                hint = " (its number on its node, and how many run there: 0 and 1 if it is the only one)"
            message = (
                f"not set: {', '.join(missing)}. {self.command} sets them for each process: start the script with it, "
                f"set them{hint}, or pass the ranks: core.DistributedContext(rank=…, size=…, …). "
            )
            if present := [name for name in names if name not in missing]:
                values = ", ".join(f"{name}={self.variables[name]}" for name in present)
                raise LauncherNotFound(f"{message}If it runs alone, unset the others: {values}")
            raise LauncherNotFound(f"{message}DistributedContext.detect() falls back to one rank")
        methods = (self.rank, self.size, self.local_rank, self.local_size, self.node_rank, self.node_count)
        return {field: method() for field, method in zip(RANK_FIELDS, methods, strict=True)}

    def job(self) -> tuple[str, ...]:
        """Return the variables, with their values, that distinguish this job from others on the node."""
        return tuple(f"{name}={self.variables[name]}" for name in self.job_variables if self.variables.get(name))

    def is_incomplete(self) -> bool:
        """Return whether this is one of several processes, by whatever variables are set."""
        rank = self.variables.get(self.names[0])
        size = self.variables.get(self.names[1])
        if _exceeds(rank, 0) or _exceeds(size, 1):
            return True
        return bool(rank) and not size and all(map(self.variables.get, self.companions))

    def number(self, name: str) -> int:
        """Return the number in a variable.

        Raises:
            ValueError: If it is not set, or not a number.
        """
        text = self.variables.get(name, "")
        if not re.fullmatch(r"\d+", text):
            raise ValueError(f"{name}={text!r}: expected a number")
        return int(text)


class Torchrun(JobEnvironment):
    """``torchrun``, and ``accelerate launch`` through it."""

    command = "torchrun"
    constructor = "core.DistributedContext.from_torch_distributed()"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    required_variables = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    job_variables = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class DeepSpeed(JobEnvironment):
    """Launcher of deepspeed."""

    command = "deepspeed"
    constructor = "core.DistributedContext.from_deepspeed()"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    required_variables = ("RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK")
    job_variables = Torchrun.job_variables


class Slurm(JobEnvironment):
    """``srun``: its tasks are ranks, or launchers, one per node. Its nodes are also read in an ``sbatch`` script."""

    command = "srun"
    constructor = "core.DistributedContext.from_slurm()"
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
             "SLURM_STEP_NUM_NODES")  # fmt: skip
    # A batch script has a SLURM_PROCID too, but is not a task of a step.
    required_variables = ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
    companions = ("SLURM_STEP_ID",)
    job_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")

    def local_size(self) -> int:
        text = self.variables[self.names[3]]
        counts = expand_counts(text)
        if self.node_rank() >= len(counts):
            raise ValueError(f"{self.names[3]}={text!r} has no entry for SLURM_NODEID={self.node_rank()}")
        return counts[self.node_rank()]

    def address(self) -> str | None:
        return next(iter(self._node_names()), None)

    def is_step(self) -> bool:
        """Return whether ``srun`` started this process."""
        return bool(self.variables.get("SLURM_STEP_ID") and self.variables.get("SLURM_STEP_TASKS_PER_NODE"))

    def nodes(self) -> list[tuple[str, int]]:
        """Return the name and the number of tasks of each node of the step, outside of one of the job.

        Raises:
            ValueError: If a list cannot be read, or the two differ in length.
        """
        name = "SLURM_STEP_TASKS_PER_NODE" if self.is_step() else "SLURM_TASKS_PER_NODE"
        nodes = self._node_names()
        tasks = expand_counts(self.variables.get(name) or f"1(x{len(nodes)})", name)
        if len(tasks) != len(nodes):
            raise ValueError(f"{name}={self.variables[name]!r}: {len(tasks)} counts for {len(nodes)} nodes")
        return list(zip(nodes, tasks, strict=True))

    def _node_names(self) -> list[str]:
        name = "SLURM_JOB_NODELIST"
        if self.is_step() and self.variables.get("SLURM_STEP_NODELIST"):
            name = "SLURM_STEP_NODELIST"
        return expand_nodes(self.variables.get(name, ""), name)


class Horovod(JobEnvironment):
    """``horovodrun``. Its rendezvous address need not be reachable at other ports, so it is not the chief's."""

    command = "horovodrun"
    constructor = "core.DistributedContext.from_horovod(hvd)"
    names = tuple(f"HOROVOD_{field.upper()}" for field in RANK_FIELDS)
    required_variables = names[:2]
    job_variables = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT",
                     "PMIX_NAMESPACE", "PMI_ID", "PMI_PORT", "PMI_JOBID", *Slurm.job_variables)  # fmt: skip

    def address(self) -> str | None:
        return None


class TensorFlow(JobEnvironment):
    """``TF_CONFIG``: one process per node, from JSON with this worker's number and the ``HOST:PORT`` of each."""

    # Each worker has a node of its own and meets the others at the chief's address and port, so jobs need no name.
    command = "TensorFlow's launcher"
    constructor = "core.DistributedContext.from_tf_config()[0]"
    names = ("TF_CONFIG",)

    def detect(self) -> bool:
        try:
            return super().detect() and self.size() > 1
        except ValueError:
            return False

    def rank(self) -> int:
        return self._worker()[0]

    def size(self) -> int:
        return len(self._worker()[1])

    def local_rank(self) -> int:
        return 0

    def local_size(self) -> int:
        return 1

    node_rank = rank
    node_count = size

    def address(self) -> str | None:
        return self._worker()[1][0].rpartition(":")[0].strip("[]")

    def _worker(self) -> tuple[int, list[str]]:
        text = self.variables["TF_CONFIG"]
        expected = 'expected {"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": N}}'
        try:
            config = json.loads(text)
            kind = config["task"]["type"]
            index = config["task"]["index"]
            addresses = config["cluster"]["worker"]
        except (ValueError, LookupError, TypeError) as e:
            raise ValueError(f"TF_CONFIG={text!r}: {expected} ({type(e).__name__}: {e})") from e
        if kind != "worker":
            raise ValueError(f"TF_CONFIG: this process is of type {kind!r}; only a worker has a rank")
        if not isinstance(addresses, list) or index not in range(len(addresses)):
            raise ValueError(f"TF_CONFIG={text!r}: {expected}, with the N of one of the workers")
        return index, addresses


class _NodesGuessed(JobEnvironment):
    """A launcher that sets no node numbers: a guess, as if every node had as many ranks as this one, in blocks."""

    knows_nodes = False

    def node_rank(self) -> int:
        rank = self.rank()
        if self.local_size() >= self.size():
            return 0
        node = rank // max(self.local_size(), 1)
        # Never claim the chief's node wrongly: that rank would look for the chief's socket and hang. Only a rank
        # that equals its local rank is known to have all lower ones beside it.
        if node == 0 and rank != self.local_rank():
            return 1
        return node

    def node_count(self) -> int:
        if self.local_size() >= self.size():
            return 1
        return max(2, -(-self.size() // max(self.local_size(), 1)))


class RayTrain(_NodesGuessed):
    """Ray Train, and whatever else sets torch's four variables."""

    command = "a launcher like torchrun"
    constructor = "core.DistributedContext.from_torch_distributed()"
    names = Torchrun.names[:4]
    companions = ("MASTER_ADDR",)
    job_variables = Torchrun.job_variables

    def is_incomplete(self) -> bool:
        # Lightning numbers its processes by LOCAL_RANK. Without MASTER_ADDR a script may choose its GPU by it.
        if all(map(self.variables.get, ("LOCAL_RANK", "MASTER_ADDR"))) and not self.variables.get("WORLD_SIZE"):
            return True
        return super().is_incomplete()


class OpenMpi(_NodesGuessed):
    """``mpirun`` of Open MPI."""

    command = "mpirun"
    constructor = "core.DistributedContext.from_mpi()"
    names = tuple(f"OMPI_COMM_WORLD_{field.upper()}" for field in RANK_FIELDS[:4])
    job_variables = ("PMIX_NAMESPACE", "PMI_ID", "PMI_PORT", "PMI_JOBID")


class Hydra(_NodesGuessed):
    """``mpirun`` of MPICH and Intel MPI. ``srun --mpi=pmi2`` sets the first two variables as well."""

    command = "mpirun"
    constructor = "core.DistributedContext.from_mpi()"
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    job_variables = OpenMpi.job_variables


# In the order in which they are tried: a launcher that another one may have started comes first.
ENVIRONMENTS = (Torchrun, DeepSpeed, Horovod, TensorFlow, RayTrain, OpenMpi, Hydra, Slurm)
# RayTrain's four are what torchrun and deepspeed need of a rank as well.
_REPORTED_INCOMPLETE = (RayTrain, Horovod, OpenMpi, Hydra, Slurm)


def detect_launcher(variables: Mapping[str, str]) -> JobEnvironment | None:
    """Return the environment of the launcher that started this process, None if it runs alone.

    Raises:
        LauncherNotFound: If this is one of several processes whose numbers are incomplete: alone, each would be
            rank 0 of a run of its own.
    """
    for candidate in ENVIRONMENTS:
        if (environment := candidate(variables)).detect():
            return environment
    for candidate in _REPORTED_INCOMPLETE:
        if (environment := candidate(variables)).is_incomplete():
            environment.ranks()  # raises for the missing ones
    return None


def detect_ranks(variables: Mapping[str, str]) -> JobEnvironment | None:
    """Return the environment of a job of several ranks, all of whose numbers can be read; None if this is the only one.

    Raises:
        ValueError: If variables are missing or invalid.
    """
    environment = detect_launcher(variables)
    if environment is not None and environment.ranks()["size"] > 1:
        return environment
    return None


def expand_counts(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Return Slurm's counts per node as a list: ``"2(x3),1"`` is ``[2, 2, 2, 1]``.

    Raises:
        ValueError: If the text is malformed; the message names the variable ``name``.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{name}={text!r}: expected counts like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodes(text: str, name: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Return the names in Slurm's list of nodes: ``"gpu[03-05,9],cpu1"`` is ``gpu03 gpu04 gpu05 gpu9 cpu1``.

    Raises:
        ValueError: If the text is malformed; the message names the variable ``name``.
    """
    nodes: list[str] = []
    position = 0
    while position < len(text):
        match = _NODE_LIST.match(text, position)
        if match is None:
            raise ValueError(f"{name}={text!r}: expected nodes like gpu[03-05,9],cpu1")
        before, ranges, after = match.groups(default="")
        numbers = [number for part in ranges.split(",") for number in _expand_range(part)]
        nodes += [f"{before}{number}{after}" for number in numbers]
        position = match.end()
    return nodes


def _expand_range(part: str) -> list[str]:
    first, dash, last = part.partition("-")
    if not dash:
        return [part]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _exceeds(text: str | None, limit: int) -> bool:
    return text is not None and re.fullmatch(r"\d+", text) is not None and int(text) > limit
