"""Ranks on several machines lose each other, or wait for each other: cut cables, killed ranks, suspended ones; IPv6."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.hosts import ADDRESSES, HAS_IPV6, IPV6_ADDRESSES, IPV6_NAMES, SECRET, Hosts, hosts, three_hosts
from support.processes import suspend, until

__all__ = ["hosts", "three_hosts"]
SCRIPT = """
    import logging, os, sys, time
    from det_core.core._distributed import DistributedContext
    rank, size, local, load, chief = *map(int, sys.argv[1:5]), sys.argv[5]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    distributed = DistributedContext(rank=rank, size=size, local_rank=rank % local, local_size=local,
                                     cross_rank=rank // local, cross_size=size // local, chief_ip=chief, pub_port=12377)
    print("local", distributed.allgather_local(rank), distributed.broadcast(rank), flush=True)
    try:
        while not distributed.allgather(os.path.exists("stop"))[0]:
            for _ in range(load):  # more than the kernel takes for a process that does not read
                distributed.broadcast(bytes(1 << 20))
            time.sleep(0.01)
        print("over", flush=True)
        distributed.close()
    except Exception as e:
        distributed.close()  # which does not wait for those who are lost, either
        print(f"{time.monotonic():.3f} {type(e).__name__}: {e}", flush=True)
        os._exit(3)
"""
LOAD = 30
"""Megabytes that the chief sends each rank in a turn."""


class Ranks:
    """Two ranks for each of the machines, spread over the first ``machines`` of them, and their outputs."""

    def __init__(self, folder: Path, hosts: Hosts, machines: int, chief: str, load: int) -> None:
        script = folder / "rank.py"
        script.write_text(textwrap.dedent(SCRIPT))
        size = 2 * len(hosts.numbers)
        self.local_size = size // machines
        self.outputs = [folder / f"{rank}.out" for rank in range(size)]
        self.processes: list[subprocess.Popen[bytes]] = []
        environ = {**os.environ, "DET_CORE_SECRET": SECRET}
        for rank, output in enumerate(self.outputs):
            arguments = map(str, (script, rank, size, self.local_size, load, chief))
            command = [*hosts.on(rank // self.local_size + 1), sys.executable, "-u", *arguments]
            with output.open("wb") as out:
                process = subprocess.Popen(command, env=environ, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
            self.processes.append(process)

    def error(self, rank: int, since: float) -> str:
        """Return what a rank has raised, once it has ended because of that, less than ten seconds after ``since``."""
        assert self.processes[rank].wait() == 3, self.outputs[rank].read_text()
        at, _, error = self.outputs[rank].read_text().splitlines()[-1].partition(" ")
        print(f"rank {rank} after {float(at) - since:.1f} s: {error}")
        assert error.startswith("PeerLost: ") and float(at) - since < 10, f"{at}, {since}: {error}"
        return error

    def wait_for(self, text: str, ranks: list[int]) -> None:
        """Wait until each of ``ranks`` has printed ``text``."""
        for rank in ranks:
            output = self.outputs[rank]
            until(lambda o=output: text in o.read_text(), output.read_text, of=self.processes[rank])

    def end(self) -> None:
        """Have all ranks end well."""
        assert [process.poll() for process in self.processes] == [None] * len(self.processes)
        (self.outputs[0].parent / "stop").touch()
        self.wait_for("over", [*range(len(self.processes))])
        for rank, process in enumerate(self.processes):
            assert process.wait() == 0
            print(f"rank {rank}:", self.outputs[rank].read_text())


@contextmanager
def running(
    folder: Path, hosts: Hosts, machines: int = 2, *, chief: str = ADDRESSES[0], load: int = 0
) -> Iterator[Ranks]:
    """Yield ranks that have met; they are killed at the end."""
    ranks = Ranks(folder, hosts, machines, chief, load)
    try:
        for rank in range(len(ranks.outputs)):
            first = rank - rank % ranks.local_size
            ranks.wait_for(f"local {[*range(first, first + ranks.local_size)]} 0\n", [rank])
        time.sleep(1)  # they talk
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.wait()
        for number in hosts.numbers:
            hosts.mend(number)


def wait_since(moment: float, seconds: float) -> None:
    """Wait until so many seconds have passed since ``moment``: for what must not happen meanwhile."""
    time.sleep(max(0.0, moment + seconds - time.monotonic()))


@pytest.mark.parametrize(
    ("fault", "load"),
    [("cable", 0), ("cable", LOAD), ("kill worker", 0), ("kill local chief", 0), ("kill chief", 0)],
)
def test_cut_cable_of_two_nodes_raises_peer_lost_on_both(tmp_path: Path, hosts: Hosts, fault: str, load: int) -> None:
    """Also where what is on its way puts off the keepalive of the connection that it is on."""
    with running(tmp_path, hosts, load=load) as ranks:
        began = time.monotonic()
        victim = {"kill worker": 3, "kill local chief": 2, "kill chief": 0}.get(fault)
        if victim is None:
            hosts.cut()
        else:
            ranks.processes[victim].kill()
        for rank in {0, 1, 2, 3} - {victim}:
            error = ranks.error(rank, began)
            assert victim is None or f"rank {victim} (" in error


@pytest.mark.parametrize("load", [0, LOAD])
@pytest.mark.parametrize("machine", [1, 3])
def test_unplugged_node_of_three_is_named_by_the_others(
    tmp_path: Path, three_hosts: Hosts, machine: int, load: int
) -> None:
    """One that cannot reach the chief names it; the chief's machine names a rank of the first that it cannot reach."""
    names = {1: {1: r"rank [2-5] \(host node[23],", 2: r"rank 0 \(host node1,", 3: r"rank 0 \(host node1,"}}
    names[3] = {1: r"rank [45] \(host node3,", 2: r"rank [45] \(host node3,", 3: r"rank 0 \(host node1,"}
    with running(tmp_path, three_hosts, 3, load=load) as ranks:
        began = time.monotonic()
        three_hosts.cut(machine)
        for rank in range(6):
            assert re.search(names[machine][rank // 2 + 1], ranks.error(rank, began))


def test_cut_cable_of_a_single_node_job_is_not_noticed(tmp_path: Path, hosts: Hosts) -> None:
    with running(tmp_path, hosts, machines=1, load=LOAD) as ranks:
        hosts.cut(1)
        wait_since(time.monotonic(), 15)
        ranks.end()


@pytest.mark.parametrize("suspended", [0, 3])
@pytest.mark.parametrize("machines", [1, 2])
def test_rank_suspended_for_a_minute_is_late(tmp_path: Path, hosts: Hosts, machines: int, suspended: int) -> None:
    """Its kernel answers for it, although it takes no more of what is sent to it."""
    others = [rank for rank in range(4) if rank != suspended]
    with running(tmp_path, hosts, machines, load=LOAD) as ranks:
        suspend(ranks.processes[suspended].pid)
        began = time.monotonic()
        ranks.wait_for("has waited for", others)
        wait_since(began, 60)
        os.kill(ranks.processes[suspended].pid, signal.SIGCONT)
        ranks.end()


@pytest.mark.parametrize("starved", [0, 3])
@pytest.mark.parametrize("machines", [1, 2])
def test_rank_starved_for_a_minute_is_late(tmp_path: Path, hosts: Hosts, machines: int, starved: int) -> None:
    """It gets a processor for some milliseconds in a second, also its threads that would answer for it."""
    processors = os.sched_getaffinity(0)
    one = {max(processors)}

    def schedule(policy: int, where: set[int]) -> None:
        for thread in map(int, os.listdir(f"/proc/{ranks.processes[starved].pid}/task")):
            os.sched_setaffinity(thread, where)
            os.sched_setscheduler(thread, policy, os.sched_param(0))

    with running(tmp_path, hosts, machines, load=LOAD) as ranks:
        burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            os.sched_setaffinity(burner.pid, one)
            schedule(os.SCHED_IDLE, one)
            wait_since(time.monotonic(), 60)
            schedule(os.SCHED_OTHER, processors)
        finally:
            burner.kill()
            burner.wait()
        ranks.end()


@pytest.mark.parametrize("chief", [IPV6_ADDRESSES[0], f"[{IPV6_ADDRESSES[0]}]", IPV6_NAMES[0]])
def test_ranks_connect_by_ipv6(tmp_path: Path, hosts: Hosts, chief: str) -> None:
    if not HAS_IPV6:
        pytest.skip("this kernel has no IPv6")
    with running(tmp_path, hosts, chief=chief) as ranks:
        ranks.end()
