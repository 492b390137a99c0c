"""Nodes of a job: hosts and slots, from options, a master's allocation, Slurm or MPI."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from det_core._env import Environment
from det_core._environments import Hydra, JobEnvironment, OpenMpi, Slurm
from det_core._info import get_cluster_info

PORT = 29500
"""Default port where the ranks of several nodes meet, as torchrun's and deepspeed's."""
NO_GPU_NOTICE = "no GPU is visible: starting 1 process (--nproc-per-node N starts N)"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")


class UsageError(ValueError):
    """Invalid command line; the message is one line that says what to change."""


class CannotStart(RuntimeError):
    """Valid command line that cannot run here and now; the message is one line that says why."""


@dataclass(frozen=True)
class Host:
    """A node of a job: its name or address for the other nodes, and the number of its ranks."""

    name: str
    slots: int = 0
    """0 in the result of a finder: as many as this node has GPUs."""


@dataclass(frozen=True)
class Layout:
    """The nodes of a job in the order of their ranks, and the one that this process runs on."""

    source: str
    """Origin of the layout as its users know it, such as "Slurm job 17"."""
    hosts: tuple[Host, ...]
    node_rank: int = 0
    """Index of this node."""
    port: int = 0
    """Port on the first node where the ranks meet; 0 is any free one, for a single node."""
    hosts_are_addresses: bool = True
    """Whether each name in ``hosts`` is an address; otherwise the first one alone is."""
    notice: str = ""
    """Message for the user."""

    @property
    def this_host(self) -> Host:
        """This node."""
        return self.hosts[self.node_rank]

    @property
    def multi_node(self) -> bool:
        """Whether there is another node."""
        return len(self.hosts) > 1

    @property
    def chief(self) -> str:
        """Address of the first node; the loopback's for a single node."""
        if self.multi_node:
            return self.hosts[0].name
        return "127.0.0.1"

    @property
    def size(self) -> int:
        """Number of ranks on all nodes."""
        return sum(host.slots for host in self.hosts)

    @property
    def first_rank(self) -> int:
        """First rank of this node."""
        return sum(host.slots for host in self.hosts[: self.node_rank])

    def node_of(self, rank: int) -> int | None:
        """Return the index of the node that runs a rank, None if no node does."""
        nodes = [index for index, host in enumerate(self.hosts) for _ in range(host.slots)]
        return dict(enumerate(nodes)).get(rank)


def find_layout(options: argparse.Namespace, environment: Environment) -> Layout:
    """Return the layout from the first source that applies.

    Raises:
        UsageError: If options or variables contradict each other, are missing or malformed.
    """
    try:
        layout = next(filter(None, (find(options, environment) for find in _FINDERS)))
    except ValueError as e:
        raise UsageError(str(e)) from e
    layout = _fill_slots(layout, options, environment)
    if not layout.multi_node:
        return replace(layout, port=options.master_port or 0)
    if options.master_addr is not None:
        layout = replace(layout, hosts=(Host(options.master_addr, layout.hosts[0].slots), *layout.hosts[1:]))
    return replace(layout, port=options.master_port or layout.port or PORT)


def _fill_slots(layout: Layout, options: argparse.Namespace, environment: Environment) -> Layout:
    """Return the layout with ``--nproc-per-node`` on all nodes, else with the GPUs of this one for missing numbers."""
    slots = options.nproc_per_node
    if slots:
        return replace(layout, hosts=tuple(Host(host.name, slots) for host in layout.hosts))
    if all(host.slots for host in layout.hosts):
        return layout
    slots = gpus(environment)
    hosts = tuple(Host(host.name, host.slots or slots or 1) for host in layout.hosts)
    if slots:
        return replace(layout, hosts=hosts)
    return replace(layout, hosts=hosts, notice=NO_GPU_NOTICE)


# Finders return None where their source does not apply.


def _from_host_options(options: argparse.Namespace, environment: Environment) -> Layout | None:
    """Return the layout of ``--hostfile FILE`` or ``--hosts A:2,B:2``."""
    rank = options.node_rank
    if options.hostfile is not None and options.hosts is not None:
        raise UsageError("--hostfile and --hosts are exclusive: pass one of them")
    if options.hostfile is not None:
        source = options.hostfile
        hosts = read_hostfile(source)
    elif options.hosts is not None:
        source = f"--hosts {options.hosts}"
        hosts = read_hosts(options.hosts)
    else:
        return None
    if options.nnodes not in (None, len(hosts)):
        raise UsageError(f"--nnodes {options.nnodes}: {source} has {len(hosts)} hosts")
    if rank is None and len(hosts) > 1:
        rank = index_of_this_host(hosts, source)
    rank = rank or 0
    if rank >= len(hosts):
        raise UsageError(f"--node-rank {rank}: {source} has {len(hosts)} hosts, numbered from 0")
    return Layout(source, hosts, rank)


def _from_node_options(options: argparse.Namespace, environment: Environment) -> Layout | None:
    """Return the layout of ``--nnodes N --node-rank R --master-addr A``: nodes like this one."""
    nnodes = options.nnodes
    rank = options.node_rank
    if nnodes is None:
        return None
    if nnodes == 1:
        return _single_node(options, environment)
    if rank is None:
        raise UsageError(f"--nnodes {nnodes}: pass the number of this node, from 0, with --node-rank R")
    if rank >= nnodes:
        raise UsageError(f"--node-rank {rank}: expected a number below --nnodes {nnodes}")
    if options.master_addr is None:
        raise UsageError(f"--nnodes {nnodes}: pass the address of node 0 with --master-addr HOST")
    return _uniform("--nnodes", nnodes, rank, options.master_addr)


def _from_allocation(options: argparse.Namespace, environment: Environment) -> Layout | None:
    """Return the layout of a master's allocation, whose files hold slots and addresses."""
    if (info := get_cluster_info()) is None:
        return None
    addresses = zip(info.container_addrs, info.container_slot_counts, strict=True)
    hosts = tuple(Host(address, slots) for address, slots in addresses)
    port = int(os.environ.get("C10D_PORT") or 29400)
    return Layout(f"allocation {info.allocation_id}", hosts, info.container_rank, port)


def _from_mpi(
    implementation: type[JobEnvironment], options: argparse.Namespace, environment: Environment
) -> Layout | None:
    """Return the layout of ``mpirun``, which started this launcher and one on each other node."""
    mpi = implementation(environment.launch)
    if not all(map(mpi.variables.get, mpi.names[:2])):
        return None
    nodes = mpi.size()
    chief = options.master_addr or environment.chief_ip
    launchers = mpi.variables.get(mpi.names[3], "1")  # `srun --mpi=pmi2` does not set it
    if nodes > 1 and launchers != "1":
        raise UsageError(
            f"mpirun started {launchers} launchers on this node, each of which would start all of its ranks: start "
            "one per node (mpirun --map-by ppr:1:node), or run the script under "
            f"python -m det_core.launch.wrap_rank {mpi.names[0]}"
        )
    if nodes > 1 and not chief:
        raise UsageError("MPI does not publish the address of node 0: add --master-addr HOST")
    return _uniform("mpirun", nodes, mpi.rank(), chief or "127.0.0.1")


def _from_slurm(options: argparse.Namespace, environment: Environment) -> Layout | None:
    """Return the layout of a Slurm job, in a step of ``srun`` or in an ``sbatch`` script."""
    slurm = Slurm(environment.launch)
    if not all(map(slurm.variables.get, ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"))):
        return None
    nodes = slurm.nodes()
    most_tasks = max(tasks for _, tasks in nodes)
    if slurm.is_step() and most_tasks > 1:
        raise UsageError(
            f"srun started {sum(tasks for _, tasks in nodes)} launchers, each of which starts all ranks of its node: "
            "add --ntasks-per-node=1 to srun"
        )
    if not slurm.is_step() and len(nodes) > 1:
        raise UsageError(
            f"the job has {len(nodes)} nodes, but this launcher runs on one of them: start one on each, with "
            "srun --ntasks-per-node=1 before the command (or use this node alone: --nnodes 1)"
        )
    if slurm.variables.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
        gpus_on_node = slurm.number("SLURM_GPUS_ON_NODE")
        hosts = tuple(Host(name, gpus_on_node) for name, _ in nodes)
    elif most_tasks > 1:
        hosts = tuple(Host(name, tasks) for name, tasks in nodes)
    else:
        hosts = tuple(Host(name) for name, _ in nodes)
    # Equal on all nodes and different for each job. Steps of 2, as the launchers meet at the port after it.
    port = 20000 + 2 * (slurm.number("SLURM_JOB_ID") % 5000)
    node_rank = 0
    if slurm.is_step():
        node_rank = slurm.node_rank()
    return Layout(f"Slurm job {slurm.variables['SLURM_JOB_ID']}", hosts, node_rank, port)


def _single_node(options: argparse.Namespace, environment: Environment) -> Layout:
    return Layout("this node", (Host("127.0.0.1"),))


def _uniform(source: str, nodes: int, rank: int, chief: str) -> Layout:
    """Return a layout of nodes with as many slots as this one. The launchers compare sizes when they connect."""
    hosts = (Host(chief), *(Host(f"node{index}") for index in range(1, nodes)))
    return Layout(source, hosts, rank, hosts_are_addresses=False)


# Open MPI before Slurm, as mpirun may run inside of a Slurm job; Slurm before Hydra, as srun sets PMI's variables too.
_FINDERS: tuple[Callable[[argparse.Namespace, Environment], Layout | None], ...] = (
    _from_host_options,
    _from_node_options,
    _from_allocation,
    partial(_from_mpi, OpenMpi),
    _from_slurm,
    partial(_from_mpi, Hydra),
    _single_node,
)


def gpus(environment: Environment) -> int:
    """Return the number of GPUs that this process may use."""
    devices = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    if environment.cuda_visible_devices is None:
        return devices
    return min(devices, sum(part.strip() not in ("", "-1") for part in environment.cuda_visible_devices.split(",")))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts of a file with lines of ``NAME slots=N`` (default: 1); ``#`` begins a comment.

    Raises:
        UsageError: If the file cannot be read or is malformed; the message names file and line.
    """
    try:
        text = Path(path).read_text()
    except OSError as e:
        raise UsageError(f"hostfile {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"hostfile {path} is not text: {e}") from e
    lines = [(f"{path}:{number}", line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    hosts = [_parse_host(place, words) for place, words in lines if words]
    if not hosts:
        raise UsageError(f"hostfile {path} is empty: expected lines like `node1 slots=4`")
    return _check_distinct(path, hosts)


def read_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in ``NAME:N,NAME:N``; an IPv6 address before a number stands in brackets.

    Raises:
        UsageError: If the text is malformed.
    """
    hosts = []
    for part in text.split(","):
        words = [part]  # a name, or an IPv6 address, without a number
        if match := re.fullmatch(r"\[(.*)\](?::(.*))?|([^:]*):([^:]*)", part):
            name, *count = (group for group in match.groups() if group is not None)
            words = [name, *(f"slots={number}" for number in count)]
        hosts.append(_parse_host(f"--hosts {text}", words))
    return _check_distinct(f"--hosts {text}", hosts)


def _parse_host(place: str, words: list[str]) -> Host:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise UsageError(f"{place}: invalid host name {name!r}: expected NAME slots=N")
    match = re.fullmatch(r"(?:slots=(\d+))?", " ".join(rest))
    if match is None:
        raise UsageError(f"{place}: expected {name} slots=N, found {' '.join(words)!r}")
    if match[1] and not int(match[1]):
        raise UsageError(f"{place}: {name} slots=0: expected 1 or more, or no such line")
    return Host(name, int(match[1] or 1))


def _check_distinct(source: str, hosts: list[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{source}: duplicate host {duplicate}: give it one entry with all its slots")
    return tuple(hosts)


def write_hostfile(path: str, hosts: Iterable[Host]) -> str:
    """Write a file that :func:`read_hostfile` and deepspeed can read, and return its path."""
    Path(path).write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
    return path


def index_of_this_host(hosts: Iterable[Host], source: str) -> int:
    """Return the index of this node among ``hosts``, by its name or its addresses.

    Raises:
        UsageError: If none or several of them are this node.
    """
    matches = [index for index, host in enumerate(hosts) if is_this_host(host.name)]
    if len(matches) == 1:
        return matches[0]
    raise UsageError(
        f"{len(matches)} hosts of {source} match this node ({socket.gethostname()}): pass its number, --node-rank R"
    )


def is_this_host(name: str) -> bool:
    """Return whether a host's name or address is this node's."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    own = _own_addresses()
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in addresses)


def _own_addresses() -> set[str]:
    """Return the addresses of this node, from the kernel's tables."""
    # A trial bind() would not do: with net.ipv4.ip_nonlocal_bind every address there is can be bound.
    ipv4 = re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", _read_text("/proc/net/fib_trie"))
    ipv6 = (line.split()[0] for line in _read_text("/proc/net/if_inet6").splitlines())
    return {*ipv4, *(str(ipaddress.IPv6Address(bytes.fromhex(digits))) for digits in ipv6)}


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # a kernel without IPv6 has no if_inet6
        return ""
