"""Every launcher on two machines: network namespaces with host names, addresses and SSH servers of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.frameworks import (
    FRAMEWORKS,
    PRINTS,
    PYTHON,
    Framework,
    assert_all_was_printed,
    need,
    places,
    told,
    unprefixed,
    variables,
)
from support.hosts import ADDRESSES, NAMES, Hosts
from support.launcher import Launched, launched, write
from support.processes import until

PLACES = places(dict.fromkeys(NAMES, 2))
SECRET = "a secret of two machines"
WAITS = """
    import os, signal, sys, time
    got = []
    signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
    print("ready", os.getpid(), flush=True)
    while not got:
        time.sleep(0.01)
    print("got", *got, flush=True)
"""
ENDS = """
    import os, time
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    print("x" * 100000)
"""
HOLDS = """
    import os, sys, time
    from det_core import core
    {context}
    with core.init(distributed=distributed) as ctx:
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
    """After each test nothing but servers runs on either machine."""
    yield
    hosts.nothing_left()


def by_ssh(framework: Framework, hosts: Hosts, *options: str) -> list[str]:
    """The words before a script that one launcher on the first machine runs on both, two processes on each."""
    return [*hosts.on(1), *framework.launcher("--hosts", ",".join(f"{name}:2" for name in NAMES), *options)]


def one_on_each(framework: Framework, hosts: Hosts, number: int, *options: str) -> list[str]:
    """The words before a script that a launcher on each machine runs there, two processes each."""
    place = ["--nnodes", "2", "--node-rank", str(number - 1), "--master-addr", ADDRESSES[0], "--master-port", "29600"]
    return [*hosts.on(number), *framework.launcher(*place, "--nproc-per-node", "2", *options)]


def env(folder: Path) -> dict[str, str]:
    return {**variables(), "GLOO_SOCKET_IFNAME": "eth0", "HOME": str(folder)}


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_one_launcher_starts_both_by_ssh(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = framework.who(tmp_path)
    with launched(by_ssh(framework, hosts), script, folder=tmp_path, **env(tmp_path)) as job:
        assert job.wait() == 0, job.err
    everyone_is_right([job])


@pytest.mark.parametrize("name", ["torch_distributed", "deepspeed"])
def test_a_launcher_on_each(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = framework.who(tmp_path)
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                launched(
                    one_on_each(framework, hosts, number), script,
                    folder=tmp_path, DET_CORE_SECRET=SECRET, **env(tmp_path),
                )
            )
            for number in (1, 2)
        ]  # fmt: skip
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    everyone_is_right(jobs)
    assert sorted(told(jobs[1].out)) == [2, 3], "each launcher shows its own"


def everyone_is_right(jobs: list[Launched]) -> None:
    found = told("".join(job.out for job in jobs))
    assert sorted(found) == [0, 1, 2, 3], [job.err for job in jobs]
    for ranks in found.values():
        assert [rank[:2] for rank in ranks] == PLACES
        assert len({rank[2] for rank in ranks}) == 1 and ranks[0][2], "one secret, handed to every rank"
    for job in jobs:
        assert unprefixed(job.out) == []
        assert [line for line in unprefixed(job.err) if not line.startswith("[launcher] ")] == []


def test_launchers_by_hand_need_a_secret(hosts: Hosts, tmp_path: Path) -> None:
    for name in ("torch_distributed", "deepspeed"):
        framework = FRAMEWORKS[name]
        need(*framework.needs)
        with launched(
            one_on_each(framework, hosts, 2), framework.who(tmp_path), folder=tmp_path, **env(tmp_path)
        ) as job:
            assert job.wait() == 2
        assert re.search(r"^    export DET_CORE_SECRET=[0-9a-f]{64}$", job.err, re.MULTILINE), job.err


@pytest.mark.parametrize("name", ["torch_distributed", "deepspeed"])
def test_a_chief_that_cannot_be_reached_is_one_line(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = write(tmp_path, "ok.py", "print('ran')")
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.77.0.99", "--nproc-per-node", "1"]
    command = [*hosts.on(2), *framework.launcher(*place)]
    with launched(command, script, folder=tmp_path, DET_CORE_SECRET=SECRET, **env(tmp_path)) as job:
        assert job.wait() == 1, job.err
    (line,) = [line for line in job.err.splitlines() if line.startswith("[launcher] ")]
    assert "10.77.0.99" in line, job.err


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_the_secret_is_told_to_nobody_else(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    secret = f"{SECRET} of {name}"  # others may run their launchers beside this one
    script = write(tmp_path, "holds.py", HOLDS.format(context=framework.context))
    write(tmp_path, "stranger.py", STRANGER)
    with launched(by_ssh(framework, hosts), script, folder=tmp_path, DET_CORE_SECRET=secret, **env(tmp_path)) as job:
        job.wait_for("ready", times=4)
        seen = [*hosts.processes(1).values(), *hosts.processes(2).values()]
        assert len(seen) > 4
        assert not [command for command in seen if secret in command]
        assert 12360 in hosts.listening(1), "where the chief waits for other machines"
        stranger = [*hosts.on(2), "env", "DET_CORE_SECRET=another", PYTHON, "stranger.py", ADDRESSES[0]]
        with launched(stranger, folder=tmp_path, **env(tmp_path)) as other:
            assert other.wait() == 1
        assert "Error" in other.err and job.process.poll() is None, other.err
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.err
    assert not [path for path in Path("/tmp").glob("det-core-*/variables") if secret in _text(path)]


def _text(path: Path) -> str:
    """A file's text; none, if it is gone by now."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_sigterm_reaches_both(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = write(tmp_path, "waits.py", WAITS)
    with launched(by_ssh(framework, hosts), script, folder=tmp_path, **env(tmp_path)) as job:
        job.wait_for("ready", times=4)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 0, job.err
    assert sorted(line for line in job.out.splitlines() if "got" in line) == [f"[rank={r}] got 15" for r in range(4)]


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_output_of_any_kind_comes_through_whole_from_both(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    words = [write(tmp_path, "prints.py", PRINTS), framework.rank, "10000000", "50000"]
    with launched(by_ssh(framework, hosts), *words, folder=tmp_path, **env(tmp_path)) as job:
        assert job.wait() == 0, job.err
    assert job.err_bytes_lines() == [b"[rank=%d] to stderr" % rank for rank in range(4)]
    assert_all_was_printed(job.out_bytes, ranks=4, long=10_000_000, lines=50_000)


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_last_words_that_come_after_the_framework_has_ended_count(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = write(tmp_path, "ends.py", ENDS)
    with launched(by_ssh(framework, hosts), script, folder=tmp_path, **env(tmp_path)) as job:
        job.wait_for("ready", times=4)
        (near,) = [pid for pid, command in hosts.processes(1).items() if "_near" in command and "_far" in command]
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        (agent,) = {*map(int, children)} - {near}
        os.kill(near, signal.SIGSTOP)
        try:
            (tmp_path / "go").touch()
            until(lambda: not os.path.exists(f"/proc/{agent}"))
            time.sleep(0.5)  # in which it would end too
            assert job.process.poll() is None, job.err
        finally:
            os.kill(near, signal.SIGCONT)
        assert job.wait() == 0, job.err
    assert unprefixed(job.out) == [] and job.err == ""
    long = "x" * 100_000
    assert sorted(line for line in job.out.splitlines() if long in line) == [f"[rank={r}] {long}" for r in range(4)]


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_nothing_outlives_kill_9_on_either(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = write(tmp_path, "waits.py", WAITS)
    with launched(by_ssh(framework, hosts), script, folder=tmp_path, **env(tmp_path)) as job:
        job.wait_for("ready", times=4)
        os.kill(job.pid, signal.SIGKILL)
        job.process.wait()
        hosts.nothing_left()


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_a_failure_on_the_other_machine_ends_all(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = write(
        tmp_path,
        "fails.py",
        f"""
        import os, sys, time
        print("ready", flush=True)
        if os.environ[{framework.rank!r}] == "3":
            time.sleep(1)
            sys.exit("rank 3 has had enough")
        time.sleep(600)
        """,
    )
    with launched(by_ssh(framework, hosts, "--grace", "4"), script, folder=tmp_path, **env(tmp_path)) as job:
        job.wait_for("ready", times=4)
        assert job.wait() == 1, job.err
    assert "rank 3 has had enough" in job.err, job.err


@pytest.mark.parametrize(
    "other, text",
    [("node9", "node9"), ("10.77.0.99", "10.77.0.99")],
    ids=["a name that nobody knows", "an address where nobody is"],
)
@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_a_host_that_cannot_be_reached_is_one_line(
    hosts: Hosts, tmp_path: Path, name: str, other: str, text: str
) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = write(tmp_path, "ok.py", "print('ran')")
    command = [*hosts.on(1), *framework.launcher("--hosts", f"node1:1,{other}:1")]
    with launched(command, script, folder=tmp_path, **env(tmp_path)) as job:
        assert job.wait() == 1, job.err
    assert job.err.startswith("[launcher] ") and job.err.count("\n") == 1, job.err
    assert text in job.err and job.out == ""
