"""Ranks on two machines lose each other: a cable that is pulled, and each kind of rank that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from support.hosts import ADDRESSES, Hosts, hosts
from support.processes import until

__all__ = ["hosts"]
SCRIPT = f"""
    import os, sys, time
    from det_core.core._distributed import DistributedContext
    rank = int(sys.argv[1])
    distributed = DistributedContext(rank=rank, size=4, local_rank=rank % 2, local_size=2, cross_rank=rank // 2,
                                     cross_size=2, chief_ip="{ADDRESSES[0]}", pub_port=12377)
    print("local", distributed.allgather_local(rank), distributed.broadcast(rank), flush=True)
    try:
        while True:
            distributed.allgather(rank)
            time.sleep(0.01)
    except Exception as e:
        print(f"{{time.monotonic():.3f}} {{type(e).__name__}}: {{e}}", flush=True)
        os._exit(3)
"""


@pytest.mark.parametrize("fault", ["cable", "kill worker", "kill local chief", "kill chief"])
def test_two_hosts_lose_each_other(tmp_path: Path, hosts: Hosts, fault: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(SCRIPT))
    outputs = [tmp_path / f"{rank}.out" for rank in range(4)]
    environ = {**os.environ, "DET_CORE_SECRET": "between these hosts"}
    processes = []
    try:
        for rank, output in enumerate(outputs):
            command = [*hosts.on(rank // 2 + 1), sys.executable, "-u", str(script), str(rank)]
            with output.open("wb") as out:
                processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT))
        for process, output in zip(processes, outputs, strict=True):
            until(lambda o=output: "local" in o.read_text(), output.read_text, of=process)
        assert [o.read_text().split("\n")[0] for o in outputs] == ["local [0, 1] 0"] * 2 + ["local [2, 3] 0"] * 2
        time.sleep(1)
        began = time.monotonic()
        victim = {"kill worker": 3, "kill local chief": 2, "kill chief": 0}.get(fault)
        if victim is None:
            hosts.cut()
        else:
            processes[victim].kill()
        for rank, process in enumerate(processes):
            if rank == victim:
                continue
            assert process.wait() == 3, outputs[rank].read_text()
            said = outputs[rank].read_text().splitlines()[-1]
            assert "PeerLost" in said and float(said.split()[0]) - began < 10, said
            assert victim is None or f"rank {victim} (" in said
    finally:
        for process in processes:
            process.kill()
            process.wait()
        hosts.mend()
