"""Ranks on two machines lose each other, or wait for each other: a cut cable, a killed rank, a suspended one; IPv6."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.hosts import ADDRESSES, HAS_IPV6, IPV6_ADDRESSES, IPV6_NAMES, Hosts, hosts
from support.processes import suspend, until

__all__ = ["hosts"]
SCRIPT = """
    import logging, os, sys, time
    from det_core.core._distributed import DistributedContext
    rank, chief, load = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    logging.basicConfig(level=logging.WARNING)
    distributed = DistributedContext(rank=rank, size=4, local_rank=rank % 2, local_size=2, cross_rank=rank // 2,
                                     cross_size=2, chief_ip=chief, pub_port=12377)
    print("local", distributed.allgather_local(rank), distributed.broadcast(rank), flush=True)
    try:
        while not distributed.allgather(os.path.exists("stop"))[0]:
            for _ in range(load):  # more than the kernel takes for a process that does not read
                distributed.broadcast(bytes(1 << 20))
            time.sleep(0.01)
        print("over", flush=True)
        distributed.close()
    except Exception as e:
        print(f"{time.monotonic():.3f} {type(e).__name__}: {e}", flush=True)
        os._exit(3)
"""
LOAD = 30
"""Megabytes that the chief sends each rank in a turn."""


class Ranks:
    """Four ranks, two on each machine, and their outputs."""

    def __init__(self, folder: Path, hosts: Hosts, chief: str, load: int) -> None:
        script = folder / "rank.py"
        script.write_text(textwrap.dedent(SCRIPT))
        self.outputs = [folder / f"{rank}.out" for rank in range(4)]
        self.processes: list[subprocess.Popen[bytes]] = []
        environ = {**os.environ, "DET_CORE_SECRET": "between these hosts"}
        for rank, output in enumerate(self.outputs):
            command = [*hosts.on(rank // 2 + 1), sys.executable, "-u", str(script), str(rank), chief, str(load)]
            with output.open("wb") as out:
                process = subprocess.Popen(command, env=environ, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
            self.processes.append(process)

    def wait_for(self, text: str, ranks: list[int]) -> None:
        """Wait until each of ``ranks`` has printed ``text``."""
        for rank in ranks:
            output = self.outputs[rank]
            until(lambda o=output: text in o.read_text(), output.read_text, of=self.processes[rank])


@contextmanager
def four_ranks(folder: Path, hosts: Hosts, chief: str = ADDRESSES[0], load: int = 0) -> Iterator[Ranks]:
    """Four ranks that have met; killed at the end."""
    ranks = Ranks(folder, hosts, chief, load)
    try:
        ranks.wait_for("local", [0, 1, 2, 3])
        first_lines = [output.read_text().split("\n")[0] for output in ranks.outputs]
        assert first_lines == ["local [0, 1] 0"] * 2 + ["local [2, 3] 0"] * 2
        time.sleep(1)  # they talk
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.wait()
        hosts.mend()


@pytest.mark.parametrize(
    ("fault", "load"),
    [("cable", 0), ("cable", LOAD), ("kill worker", 0), ("kill local chief", 0), ("kill chief", 0)],
)
def test_two_hosts_lose_each_other(tmp_path: Path, hosts: Hosts, fault: str, load: int) -> None:
    """Also where what is on its way puts off the keepalive of the connection that it is on."""
    with four_ranks(tmp_path, hosts, load=load) as ranks:
        began = time.monotonic()
        victim = {"kill worker": 3, "kill local chief": 2, "kill chief": 0}.get(fault)
        if victim is None:
            hosts.cut()
        else:
            ranks.processes[victim].kill()
        for rank, process in enumerate(ranks.processes):
            if rank == victim:
                continue
            assert process.wait() == 3, ranks.outputs[rank].read_text()
            error = ranks.outputs[rank].read_text().splitlines()[-1]
            assert "PeerLost" in error and float(error.split()[0]) - began < 10, error
            assert victim is None or f"rank {victim} (" in error


@pytest.mark.parametrize("suspended", [0, 3])
def test_rank_suspended_for_a_minute_on_another_machine_is_late(tmp_path: Path, hosts: Hosts, suspended: int) -> None:
    """Its kernel answers for it, although it takes no more of what is sent to it."""
    others = [rank for rank in range(4) if rank != suspended]
    with four_ranks(tmp_path, hosts, load=LOAD) as ranks:
        suspend(ranks.processes[suspended].pid)
        began = time.monotonic()
        ranks.wait_for("has waited for", others)
        time.sleep(max(0.0, began + 60 - time.monotonic()))
        assert [process.poll() for process in ranks.processes] == [None] * 4
        (tmp_path / "stop").touch()
        os.kill(ranks.processes[suspended].pid, signal.SIGCONT)
        assert [process.wait() for process in ranks.processes] == [0] * 4, ranks.outputs[others[0]].read_text()
        ranks.wait_for("over", [0, 1, 2, 3])


@pytest.mark.parametrize("chief", [IPV6_ADDRESSES[0], f"[{IPV6_ADDRESSES[0]}]", IPV6_NAMES[0]])
def test_ranks_meet_by_ipv6(tmp_path: Path, hosts: Hosts, chief: str) -> None:
    if not HAS_IPV6:
        pytest.skip("this kernel has no IPv6")
    with four_ranks(tmp_path, hosts, chief) as ranks:
        (tmp_path / "stop").touch()
        assert [process.wait() for process in ranks.processes] == [0] * 4
