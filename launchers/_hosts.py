"""Where a job runs: its machines and their slots, from options, a master's allocation, Slurm or MPI."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from det_core._env import Environment
from det_core._info import get_cluster_info
from det_core._slurm import expand_counts, expand_nodes

PORT = 29500
"""Where the ranks of several machines meet if nothing says otherwise; as torchrun's and deepspeed's."""
NO_GPU_NOTICE = "no GPU is visible: starting 1 process (--nproc-per-node N starts N)"
"""What to say where there is one rank for want of GPUs."""
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")


class UsageError(ValueError):
    """A command line that cannot be run; the message is one line that says what to change."""


class CannotStart(RuntimeError):
    """A command line that could be run, but not here and now; the message is one line that says why."""


@dataclass(frozen=True)
class Host:
    """A machine of a job."""

    name: str
    """Its name or address, as the other machines reach it."""
    slots: int
    """How many ranks it gets."""


@dataclass(frozen=True)
class Layout:
    """The machines of a job in the order of their ranks, and which of them this is."""

    source: str
    """What told of them, as a person knows it ("Slurm job 17")."""
    hosts: tuple[Host, ...]
    node_rank: int = 0
    """The index of this machine."""
    port: int = 0
    """Where the ranks meet, on the first machine; 0: any free one, as there is no other machine."""
    hosts_are_addresses: bool = True
    """Whether the names of ``hosts`` are addresses; else only the first one's is."""
    notice: str = ""
    """What a person should know of it."""

    @property
    def this_host(self) -> Host:
        """This machine."""
        return self.hosts[self.node_rank]

    @property
    def multi_node(self) -> bool:
        """Whether there is another machine."""
        return len(self.hosts) > 1

    @property
    def chief(self) -> str:
        """The address of the first machine; that of the loopback where there is no other."""
        return self.hosts[0].name if self.multi_node else "127.0.0.1"

    @property
    def size(self) -> int:
        """How many ranks there are on all machines."""
        return sum(host.slots for host in self.hosts)

    @property
    def first_rank(self) -> int:
        """The first rank of this machine."""
        return sum(host.slots for host in self.hosts[: self.node_rank])

    def node_of(self, rank: int) -> int | None:
        """The index of the machine that has a rank; None where there is none."""
        nodes = [number for number, host in enumerate(self.hosts) for _ in range(host.slots)]
        return nodes[rank] if rank < len(nodes) else None


@dataclass(frozen=True)
class LayoutRequest:
    """What a finder of the place knows."""

    options: argparse.Namespace
    environment: Environment

    def slots(self) -> tuple[int, str]:
        """How many ranks this machine gets if nothing else tells, and a notice."""
        count = self.options.nproc_per_node or gpus(self.environment)
        return (int(count), "") if count else (1, NO_GPU_NOTICE)

    def number(self, name: str) -> int:
        """The number in a variable."""
        text = self.environment.launch[name]
        if not text.isdigit():
            raise UsageError(f"{name}={text!r}: expected a number")
        return int(text)


def find_layout(options: argparse.Namespace, environment: Environment) -> Layout:
    """Where the job runs, as the first of these says that applies.

    Raises:
        UsageError: options or variables contradict each other, or some are missing.
    """
    request = LayoutRequest(options, environment)
    # Open MPI before Slurm, as it may run inside a job of Slurm's; Slurm before PMI, as srun sets PMI's variables too.
    finders: tuple[Callable[[LayoutRequest], Layout | None], ...] = (
        _named,
        _numbered,
        _allocation,
        _open_mpi,
        _slurm,
        _pmi,
    )
    layout = next((found for find in finders if (found := find(request))), None) or _single_node(request)
    if options.master_addr is not None and layout.multi_node:
        layout = replace(layout, hosts=(Host(options.master_addr, layout.hosts[0].slots), *layout.hosts[1:]))
    port = options.master_port
    if port is None:
        port = (layout.port or PORT) if layout.multi_node else 0
    return replace(layout, port=port)


def _named(request: LayoutRequest) -> Layout | None:
    """``--hostfile FILE`` or ``--hosts A:2,B:2``."""
    file, names, slots = request.options.hostfile, request.options.hosts, request.options.nproc_per_node
    nnodes, rank = request.options.nnodes, request.options.node_rank
    if file is None and names is None:
        return None
    if file is not None and names is not None:
        raise UsageError("--hostfile and --hosts both name the hosts: give one of them")
    hosts = read_hosts(names, slots) if file is None else read_hostfile(file, slots)
    where = f"--hosts {names}" if file is None else str(file)
    if nnodes not in (None, len(hosts)):
        raise UsageError(f"--nnodes {nnodes}, but {where} names {len(hosts)} hosts")
    if rank is None:
        rank = index_of_this_machine(hosts, where) if len(hosts) > 1 else 0
    if rank >= len(hosts):
        raise UsageError(f"--node-rank {rank}: {where} names {len(hosts)} hosts, of which 0 is the first")
    return Layout(where, hosts, rank)


def _numbered(request: LayoutRequest) -> Layout | None:
    """``--nnodes N --node-rank R --master-addr A``: so many machines like this one."""
    nnodes, rank = request.options.nnodes, request.options.node_rank
    if nnodes is None or nnodes == 1:
        return None if nnodes is None else _single_node(request)
    if rank is None:
        raise UsageError(f"--nnodes {nnodes}: say which of them this is, from 0 on, with --node-rank R")
    if rank >= nnodes:
        raise UsageError(f"--node-rank {rank} is not below --nnodes {nnodes}")
    if request.options.master_addr is None:
        raise UsageError(f"--nnodes {nnodes}: give the address of the first one with --master-addr HOST")
    return _uniform("--nnodes", request, nnodes, rank, request.options.master_addr)


def _allocation(request: LayoutRequest) -> Layout | None:
    """An allocation of a master of the wire contract's kind: slots and addresses stand in its files."""
    if (info := get_cluster_info()) is None:
        return None
    own, notice = request.slots()
    slots = [request.options.nproc_per_node or count or own for count in info.container_slot_counts]
    hosts = tuple(Host(address, count) for address, count in zip(info.container_addrs, slots, strict=True))
    port = int(os.environ.get("C10D_PORT") or 29400)
    where = f"allocation {info.allocation_id}"
    return Layout(where, hosts, info.container_rank, port, notice="" if info.slot_ids else notice)


def _open_mpi(request: LayoutRequest) -> Layout | None:
    """``mpirun`` has started this launcher, once on each machine."""
    return _mpi(request, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _pmi(request: LayoutRequest) -> Layout | None:
    """The same under MPICH, Intel MPI, or ``srun --mpi=pmi2``."""
    return _mpi(request, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")


def _mpi(request: LayoutRequest, rank: str, size: str, local_size: str) -> Layout | None:
    launch = request.environment.launch
    if not launch.get(rank) or not launch.get(size):
        return None
    nodes, chief = request.number(size), request.options.master_addr or request.environment.chief_ip
    if nodes > 1 and launch.get(local_size, "1") != "1":
        raise UsageError(
            f"mpirun started {launch[local_size]} launchers on this machine, and each would start all ranks of it: "
            "have it start one on each (mpirun --map-by ppr:1:node), or run the script under "
            f"python -m det_core.launch.wrap_rank {rank}"
        )
    if nodes > 1 and not chief:
        raise UsageError("MPI does not tell the address of the first machine: add --master-addr HOST")
    return _uniform("mpirun", request, nodes, request.number(rank), chief or "127.0.0.1")


def _slurm(request: LayoutRequest) -> Layout | None:
    """A job of Slurm: its nodes, and its tasks or GPUs on them; in a step of ``srun``, or in an ``sbatch`` script."""
    launch = request.environment.launch
    if not launch.get("SLURM_JOB_ID") or not launch.get("SLURM_JOB_NODELIST"):
        return None
    step = bool(launch.get("SLURM_STEP_ID") and launch.get("SLURM_STEP_TASKS_PER_NODE"))
    nodes, tasks = _nodes_and_tasks(request, step)
    if step and max(tasks) > 1:
        raise UsageError(f"srun started {sum(tasks)} launchers, and one starts all ranks of a machine: srun "
                         "--ntasks-per-node=1")  # fmt: skip
    if not step and len(nodes) > 1:
        raise UsageError(
            f"the job has {len(nodes)} nodes, and this launcher runs on one of them alone: start one on each, "
            "with srun --ntasks-per-node=1 before the command (or use this node alone: --nnodes 1)"
        )
    own, notice = request.slots()
    counts = tasks
    if request.options.nproc_per_node:
        counts = [request.options.nproc_per_node] * len(nodes)
    elif launch.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
        counts = [request.number("SLURM_GPUS_ON_NODE")] * len(nodes)
    elif max(tasks) == 1:
        counts = [own] * len(nodes)
    hosts = tuple(Host(node, slots) for node, slots in zip(nodes, counts, strict=True))
    # Another one for each job, the same on all nodes; the one after it is the launchers', so not the next job's.
    port = 20000 + 2 * (int(launch["SLURM_JOB_ID"].strip() or 0) % 5000)
    where = f"Slurm job {launch['SLURM_JOB_ID']}"
    return Layout(where, hosts, request.number("SLURM_NODEID") if step else 0, port,
                 notice=notice if max(counts) == 1 else "")  # fmt: skip


def _nodes_and_tasks(request: LayoutRequest, step: bool) -> tuple[list[str], list[int]]:
    """The nodes of a job, or of its step, and how many tasks each has."""
    launch = request.environment.launch
    name = "SLURM_STEP_TASKS_PER_NODE" if step else "SLURM_TASKS_PER_NODE"
    try:
        nodes = expand_nodes(launch["SLURM_JOB_NODELIST"])
        if step:
            nodes = expand_nodes(launch.get("SLURM_STEP_NODELIST", ""), "SLURM_STEP_NODELIST") or nodes
        tasks = expand_counts(launch[name], name) if launch.get(name) else [1] * len(nodes)
    except ValueError as e:
        raise UsageError(str(e)) from e
    if len(tasks) != len(nodes):
        raise UsageError(f"{name}={launch[name]!r} is about {len(tasks)} nodes, and there are {len(nodes)}")
    return nodes, tasks


def _single_node(request: LayoutRequest) -> Layout:
    """This machine alone."""
    slots, notice = request.slots()
    return Layout("this machine", (Host("127.0.0.1", slots),), notice=notice)


def _uniform(where: str, request: LayoutRequest, nodes: int, rank: int, chief: str) -> Layout:
    """So many machines with as many slots as this one; whether they agree on that is seen when launchers link."""
    slots, notice = request.slots()
    hosts = (Host(chief, slots), *(Host(f"node{number}", slots) for number in range(1, nodes)))
    return Layout(where, hosts, rank, hosts_are_addresses=False, notice=notice)


def gpus(environment: Environment) -> int:
    """How many GPUs a process here may use."""
    there = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    if environment.cuda_visible_devices is None:
        return there
    return min(there, sum(part.strip() not in ("", "-1") for part in environment.cuda_visible_devices.split(",")))


def read_hostfile(path: str, slots: int | None = None) -> tuple[Host, ...]:
    """The machines in a file with lines of ``NAME slots=N``; ``#`` begins a comment.

    Args:
        path: the file.
        slots: how many each gets, whatever the file says. Without it a line that has no ``slots=`` means 1.

    Raises:
        UsageError: the file cannot be read or holds a mistake; the message names file and line.
    """
    try:
        text = Path(path).read_text()
    except OSError as e:
        raise UsageError(f"hostfile {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"hostfile {path} is not text: {e}") from e
    lines = ((f"{path}:{number}", line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    hosts = [_host(where, words, slots) for where, words in lines if words]
    if not hosts:
        raise UsageError(f"hostfile {path} names no host: expected lines like `node1 slots=4`")
    return _distinct(path, hosts)


def read_hosts(text: str, slots: int | None = None) -> tuple[Host, ...]:
    """The machines in ``NAME:N,NAME:N``; an IPv6 address that a number follows stands in brackets.

    Raises:
        UsageError: there is a mistake in it.
    """
    hosts = []
    for part in text.split(","):
        address, bracket, rest = part.rpartition("]")
        if bracket:
            name, colon, count = address.removeprefix("["), rest[:1], rest[1:]
        else:
            name, colon, count = part.rpartition(":") if part.count(":") == 1 else (part, "", "")  # else IPv6
        hosts.append(_host(f"--hosts {text}", [name, *([f"slots={count}"] if colon else [])], slots))
    return _distinct(f"--hosts {text}", hosts)


def _host(where: str, words: list[str], slots: int | None) -> Host:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!r} is no name of a host: expected NAME slots=N")
    match = re.fullmatch(r"(?:slots=(\d+))?", " ".join(rest))
    if match is None:
        raise UsageError(f"{where}: expected {name} slots=N, found {' '.join(words)!r}")
    if match[1] and not int(match[1]):
        raise UsageError(f"{where}: {name} has slots=0: expected 1 or more, or no such line")
    return Host(name, slots or int(match[1] or 1))


def _distinct(where: str, hosts: list[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{where}: {twice} stands there twice: give it one line with all its slots")
    return tuple(hosts)


def write_hostfile(path: str, hosts: Iterable[Host]) -> str:
    """Write a file that :func:`read_hostfile` and deepspeed can read, and return its path."""
    Path(path).write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
    return path


def index_of_this_machine(hosts: Iterable[Host], where: str) -> int:
    """Which of ``hosts`` this machine is, by its name or its addresses.

    Raises:
        UsageError: none of them, or several are.
    """
    own = _own_addresses()
    found = [number for number, host in enumerate(hosts) if is_here(host.name, own)]
    if len(found) == 1:
        return found[0]
    which = "several hosts" if found else "no host"
    raise UsageError(f"{which} of {where} is this machine ({socket.gethostname()}): say which with --node-rank R")


def is_here(name: str, own: set[str] | None = None) -> bool:
    """Whether a host's name or address is this machine's.

    Args:
        name: the host's.
        own: this machine's addresses, if they are at hand.
    """
    if name in ("localhost", socket.gethostname()):
        return True
    own = _own_addresses() if own is None else own
    try:
        found = {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in found)


def _own_addresses() -> set[str]:
    """The addresses of this machine, as the kernel lists them.

    Not those that can be bound: with ``net.ipv4.ip_nonlocal_bind`` that is every address there is.
    """
    own = set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", _read("/proc/net/fib_trie")))
    lines = _read("/proc/net/if_inet6").splitlines()  # only where there is IPv6
    return own | {str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def reserve_master_port(layout: Layout) -> int:
    """The port where the ranks meet. On the first machine it is held as long as this process lives."""
    if layout.node_rank:
        return layout.port
    held = reserve(layout.port)
    port = int(held.getsockname()[1])
    held.detach()  # stays open, here and in the supervisor
    return port


def reserve(port: int = 0) -> socket.socket:
    """A port of this machine, which no other job gets as long as the socket is open.

    It is bound and does not listen, so that rank 0 can listen on it: with SO_REUSEADDR on both sockets one of them may.

    Args:
        port: which one; 0: one that is free, so that two jobs on one machine do not meet.

    Raises:
        CannotStart: something listens on it.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("", port))
    except OSError as e:
        held.close()
        why = "is in use on this machine" if e.errno == errno.EADDRINUSE else f"cannot be used: {e.strerror}"
        raise CannotStart(f"port {port} {why}: --master-port PORT takes another one, on every machine") from e
    return held


def check_reachable(host: str, port: int, seconds: float = 10.0) -> None:
    """Look whether another machine can be reached at all: a wrong address is one line then, not a timeout of ranks.

    That nothing listens on ``port`` yet is no obstacle: the ranks there may come later.

    Args:
        host: the machine's name or address.
        port: any port that its network lets through.
        seconds: how long it may take to answer.

    Raises:
        CannotStart: the host has no address, or no machine answers there.
    """
    try:
        socket.create_connection((host, port), seconds).close()
    except ConnectionError:
        return
    except OSError as e:
        why = os.strerror(e.errno) if e.errno and not isinstance(e, socket.gaierror) else e.strerror or str(e)
        raise CannotStart(f"host {host} cannot be reached from {socket.gethostname()}: {why}") from e
