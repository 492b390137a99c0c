"""mpirun, which starts the ranks itself, with ``wrap_rank`` before each; or one of our launchers on each machine."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from support.frameworks import (
    FRAMEWORKS,
    MPI,
    PRINTS,
    assert_all_was_printed,
    everyone_is_right,
    mpirun,
    need,
    places,
    told,
    unprefixed,
    variables,
)
from support.hosts import NAMES, SECRET, Hosts
from support.launcher import launched, write

WAITS = """
    import os, signal, time
    got = []
    signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
    os.fork()
    print("ready", os.getpid(), flush=True)
    while not got:
        time.sleep(0.01)
    print("got", *got, flush=True)
"""


@pytest.fixture(autouse=True)
def has_mpi() -> None:
    need(*MPI.needs)


def test_every_rank_has_its_numbers(tmp_path: Path) -> None:
    with launched(mpirun("-np", "3"), MPI.who(tmp_path), folder=tmp_path, **variables()) as job:
        assert job.wait() == 0, job.err
        job.nothing_left()
    found = told(job.out)
    assert sorted(found) == [0, 1, 2] and unprefixed(job.out) == []
    assert all([rank[:2] for rank in ranks] == places({socket.gethostname(): 3}) for ranks in found.values())


def test_output_of_any_kind_is_complete(tmp_path: Path) -> None:
    words = [write(tmp_path, "prints.py", PRINTS), MPI.rank, "10000000", "50000"]
    # One rank: mpirun hands on what ranks print in pieces of 4 kB, and does not look where lines end.
    with launched(mpirun("-np", "1"), *words, folder=tmp_path, **variables()) as job:
        assert job.wait() == 0, job.err
    assert_all_was_printed(job.out_bytes, ranks=1, long=10_000_000, lines=50_000)


def test_sigterm_reaches_every_script(tmp_path: Path) -> None:
    script = write(tmp_path, "waits.py", WAITS.replace("os.fork()", "pass"))
    with launched(mpirun("-np", "2"), script, folder=tmp_path, **variables()) as job:
        job.wait_for("ready", times=2)
        os.kill(job.pid, signal.SIGTERM)
        job.process.wait()
        job.nothing_left()
    assert sorted(line for line in job.out.splitlines() if "got" in line) == [f"[rank={r}] got 15" for r in range(2)]


def test_nothing_outlives_kill_9(tmp_path: Path) -> None:
    script = write(tmp_path, "waits.py", WAITS)
    with launched(mpirun("-np", "2"), script, folder=tmp_path, **variables()) as job:
        job.wait_for("ready", times=4)
        os.kill(job.pid, signal.SIGKILL)
        job.process.wait()
        job.nothing_left()


def test_mpirun_on_two_nodes_numbers_the_ranks(hosts: Hosts, tmp_path: Path) -> None:
    env = {**variables(), "HOME": str(tmp_path), "DET_CORE_SECRET": SECRET, "DET_CHIEF_IP": NAMES[0]}
    options = ["-np", "4", "--host", ",".join(f"{name}:2" for name in NAMES), *passed_on(env)]
    with launched([*hosts.on(1), *mpirun(*options)], MPI.who(tmp_path), folder=tmp_path, **env) as job:
        assert job.wait() == 0, job.err
    everyone_is_right(job.out)
    hosts.nothing_left()


def test_launcher_on_each_of_two_nodes_numbers_the_ranks(hosts: Hosts, tmp_path: Path) -> None:
    framework = FRAMEWORKS["torch_distributed"]
    env = {
        **variables(), "HOME": str(tmp_path), "DET_CORE_SECRET": SECRET, "DET_CHIEF_IP": NAMES[0],
        "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    options = ["-np", "2", "--map-by", "ppr:1:node", "--host", ",".join(f"{name}:1" for name in NAMES), *passed_on(env)]
    command = [*hosts.on(1), *mpirun(*options)[: -len(MPI.launcher(MPI.rank))]]
    with launched(
        command, *framework.launcher("--nproc-per-node", "2"), framework.who(tmp_path), folder=tmp_path, **env
    ) as job:
        assert job.wait() == 0, job.err
    everyone_is_right(job.out)
    hosts.nothing_left()


def passed_on(env: dict[str, str]) -> list[str]:
    """Return mpirun's options that pass variables to other nodes."""
    return [word for name in env if name not in ("HOME",) for word in ("-x", name)]
