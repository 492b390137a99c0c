"""A launcher on each of two nodes: network namespaces with host names and addresses of their own."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.frameworks import FRAMEWORKS, PYTHON, Framework, everyone_is_right, told, unprefixed, variables
from support.hosts import ADDRESSES, NAMES, SECRET, Hosts
from support.launcher import Launched, launched, write

TORCH = FRAMEWORKS["torch_distributed"]
EACH = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
WAITS = """
    import os, signal, sys, time
    got = []
    signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
    print("ready", os.getpid(), flush=True)
    while not got:
        time.sleep(0.01)
    print("got", *got, flush=True)
"""
FAILS = """
    import os, sys, time
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    if os.environ[{rank!r}] == "3":
        sys.exit("rank 3 has had enough")
    time.sleep(600)
"""
HOLDS = """
    import os, sys, time
    from det_core import core
    with core.init(distributed=core.DistributedContext.from_torch_distributed()) as ctx:
        ctx.distributed.allgather(0)
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
        ctx.distributed.allgather(1)
"""
STRANGER = """
    import sys
    from det_core import core
    numbers = dict(rank=2, size=4, local_rank=0, local_size=1, cross_rank=1, cross_size=2)
    core.DistributedContext(**numbers, chief_ip=sys.argv[1], timeout=5)
"""


@pytest.fixture(autouse=True)
def nothing_is_left(hosts: Hosts) -> Iterator[None]:
    """Check after each test that only servers run on either node."""
    yield
    hosts.nothing_left()


@contextmanager
def on_both(
    framework: Framework, hosts: Hosts, folder: Path, script: str, *options: str, secret: str = SECRET
) -> Iterator[list[Launched]]:
    """Start a launcher on each node, with two ranks each, which finds itself among the names of both."""
    named = framework.launcher("--hosts", ",".join(f"{name}:2" for name in NAMES), *options)
    env = variables_of(folder, secret)
    with ExitStack() as stack:
        yield [
            stack.enter_context(launched([*hosts.on(number), *named], script, folder=folder, **env))
            for number in (1, 2)
        ]


def by_number(hosts: Hosts, number: int, chief: str) -> list[str]:
    """Return the command, without its script, of a launcher that gets the number of its node."""
    place = ["--nnodes", "2", "--node-rank", str(number - 1), "--master-addr", chief, "--master-port", "29600"]
    return [*hosts.on(number), *TORCH.launcher(*place, "--nproc-per-node", "2")]


def variables_of(folder: Path, secret: str = SECRET) -> dict[str, str]:
    return {**variables(), "GLOO_SOCKET_IFNAME": "eth0", "HOME": str(folder), "DET_CORE_SECRET": secret}


def ready(jobs: list[Launched]) -> None:
    """Wait until all ranks run and the launchers are linked."""
    for job in jobs:
        job.wait_for("ready", times=2)
    jobs[0].wait_for("linked with")


def all_are_right(jobs: list[Launched]) -> None:
    """Check that the launchers end with 0 and all ranks print their numbers."""
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    everyone_is_right(jobs[0].out + jobs[1].out)
    for job in jobs:
        assert [line for line in unprefixed(job.err) if not line.startswith("[launcher] ")] == []


@EACH
def test_launchers_by_host_names_number_the_ranks(hosts: Hosts, tmp_path: Path, framework: Framework) -> None:
    with on_both(framework, hosts, tmp_path, framework.who(tmp_path)) as jobs:
        all_are_right(jobs)
    assert sorted(told(jobs[1].out)) == [2, 3], "each launcher shows its own"


def test_launchers_by_node_rank_number_the_ranks(hosts: Hosts, tmp_path: Path) -> None:
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                launched(
                    by_number(hosts, number, ADDRESSES[0]), TORCH.who(tmp_path),
                    folder=tmp_path, **variables_of(tmp_path),
                )
            )
            for number in (1, 2)
        ]  # fmt: skip
        all_are_right(jobs)


def test_node_that_can_bind_any_address_finds_itself(hosts: Hosts, tmp_path: Path) -> None:
    for number in (1, 2):
        hosts.run(number, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind")
    with on_both(TORCH, hosts, tmp_path, TORCH.who(tmp_path)) as jobs:
        all_are_right(jobs)


def test_nodes_without_a_secret_show_the_command(hosts: Hosts, tmp_path: Path) -> None:
    with on_both(TORCH, hosts, tmp_path, TORCH.who(tmp_path), secret="") as jobs:
        assert all(job.wait() for job in jobs)
    (command,) = re.findall(r"^\[launcher\]     (export DET_CORE_SECRET=[0-9a-f]{64})$", jobs[0].err, re.MULTILINE)
    assert command not in jobs[1].err and "node 0's launcher shows the command" in jobs[1].err, jobs[1].err
    for job in jobs:
        assert "Error: " in job.err and "DET_CORE_SECRET" in job.err.partition("Error: ")[2], job.err


@pytest.mark.parametrize("chief", ["10.77.0.99", "node9"], ids=["where nobody is", "that nobody knows"])
def test_unreachable_chief_is_one_line(hosts: Hosts, tmp_path: Path, chief: str) -> None:
    script = write(tmp_path, "ok.py", "print('ran')")
    with launched(by_number(hosts, 2, chief), script, folder=tmp_path, **variables_of(tmp_path)) as job:
        assert job.wait() == 1, job.err
    assert re.fullmatch(rf"\[launcher\] .*{re.escape(chief)}.*\n", job.err) and job.out == "", job.err


def test_secret_is_on_no_command_line_and_strangers_are_refused(hosts: Hosts, tmp_path: Path) -> None:
    write(tmp_path, "stranger.py", STRANGER)
    with on_both(TORCH, hosts, tmp_path, write(tmp_path, "holds.py", HOLDS)) as jobs:
        ready(jobs)
        seen = [*hosts.processes(1).values(), *hosts.processes(2).values()]
        assert len(seen) > 4
        assert not [command for command in seen if SECRET in command]
        assert 12360 in hosts.listening(1), "where the chief waits for other nodes"
        stranger = [*hosts.on(2), PYTHON, "stranger.py", ADDRESSES[0]]
        with launched(stranger, folder=tmp_path, **variables_of(tmp_path, "the secret of another job")) as other:
            assert other.wait() == 1
        assert "Error" in other.err and not any(job.process.poll() for job in jobs), other.err
        (tmp_path / "go").touch()
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err


@EACH
def test_failure_on_the_other_node_ends_all(hosts: Hosts, tmp_path: Path, framework: Framework) -> None:
    script = write(tmp_path, "fails.py", FAILS.format(rank=framework.rank))
    with on_both(framework, hosts, tmp_path, script, "--grace", "4") as jobs:
        ready(jobs)
        (tmp_path / "go").touch()
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].err + jobs[1].err
    for job in jobs:
        assert re.search(r"^\[launcher\] rank 3 \(pid \d+, host node2\) failed first, with status 1", job.err, re.M)
    assert "[rank=3] rank 3 has had enough" in jobs[1].err


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_outlives_kill_9_on_either(hosts: Hosts, tmp_path: Path, number: int) -> None:
    with on_both(TORCH, hosts, tmp_path, write(tmp_path, "waits.py", WAITS)) as jobs:
        ready(jobs)
        os.kill(jobs[number - 1].pid, signal.SIGKILL)
        assert jobs[2 - number].wait() == 1
        hosts.nothing_left()
    assert f"node {number - 1} (" in jobs[2 - number].err


@pytest.mark.parametrize(("name", "script"), [("torch_distributed", HOLDS), ("horovod", WAITS)], ids=["holds", "waits"])
def test_cut_cable_ends_all_on_both_sides_within_ten_seconds(
    hosts: Hosts, tmp_path: Path, name: str, script: str
) -> None:
    """With ranks that have links of their own, and with ranks that have none."""
    try:
        with on_both(FRAMEWORKS[name], hosts, tmp_path, write(tmp_path, "s.py", script), "--grace", "2") as jobs:
            ready(jobs)
            hosts.cut()
            began = time.monotonic()
            for job in jobs:
                job.wait_for("was lost")
            assert time.monotonic() - began < 12, (
                "eight heartbeats of a second each, and the load of the machine that runs this"
            )
            assert all(job.wait() for job in jobs), jobs[0].err
            hosts.nothing_left()
    finally:
        hosts.mend()
    for number, job in enumerate(jobs):
        assert re.search(rf"\[launcher\] node {1 - number} \(\S+\) was lost", job.err), job.err
