"""Death: kill -9 of any rank, in any collective, with children of it alive, is an error that names it on the others."""

from __future__ import annotations

import os
import random
import re
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from support.processes import free_port
from support.ranks import Ranks, running

WITHIN = 2.0
"""Seconds in which every other rank must have raised, on one machine."""

SCRIPT = """
    import faulthandler, multiprocessing, os, sys, threading, time
    faulthandler.dump_traceback_later(45)  # a rank that hangs says where
    from det_core.core._distributed import DistributedContext

    collective, children, tcp = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "tcp"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed = DistributedContext(
        rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1,
        pub_port=int(os.environ["PORT"]), force_tcp=tcp, insecure=tcp)
    call = getattr(distributed, collective)
    call(rank)
    pids = []
    if children:
        context = multiprocessing.get_context("fork")
        for _ in range(children):
            child = context.Process(target=time.sleep, args=(60,), daemon=True)
            child.start()
            pids.append(child.pid)
    print("children", *pids, flush=True)
    distributed.allgather(0)
    print("looping", flush=True)
    try:
        while True:
            call(bytes(1000))
            time.sleep(0.001)
    except Exception as e:
        print(f"raised at {time.monotonic():.3f}: {type(e).__name__}: {e}", flush=True)
        os._exit(3)
"""


def kill_one(folder: Path, size: int, victim: int, collective: str, *, children: int = 2, tcp: bool = False) -> None:
    arguments = (collective, str(children), "tcp" if tcp else "unix")
    with running(SCRIPT, size, folder, env={"PORT": str(free_port())}, args=arguments) as ranks:
        try:
            ranks.wait_for("looping")
            time.sleep(random.random() * 0.2)
            killed = time.monotonic()
            ranks.processes[victim].kill()
            check_others(ranks, victim, killed, WITHIN if not tcp else 10.0)
        finally:
            end_children(ranks)


def check_others(ranks: Ranks, victim: int, killed: float, within: float) -> None:
    pid = ranks.processes[victim].pid
    for rank, process in enumerate(ranks.processes):
        if rank == victim:
            continue
        try:
            status = process.wait(within + 10)
        except Exception:
            raise AssertionError(f"rank {rank} hangs: {ranks.output(rank)[-2000:]}") from None
        said = re.search(r"raised at ([\d.]+): (.*)", ranks.output(rank))
        assert status == 3 and said, ranks.output(rank)
        assert said[2].startswith("PeerLost: ") and f"rank {victim} (host" in said[2] and f"pid {pid}" in said[2], said[
            2
        ]
        assert "last call heard of" in said[2]
        assert float(said[1]) - killed < within, f"rank {rank} took {float(said[1]) - killed:.2f} s"


def end_children(ranks: Ranks) -> None:
    for rank in range(len(ranks.processes)):
        said = re.search(r"^children (.*)$", ranks.output(rank), re.M)
        for pid in said[1].split() if said else ():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.parametrize("collective", ["gather", "allgather", "broadcast"])
@pytest.mark.parametrize("size, victim", [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_kill_with_children_alive(tmp_path: Path, size: int, victim: int, collective: str) -> None:
    kill_one(tmp_path, size, victim, collective)


@pytest.mark.long
@pytest.mark.parametrize("collective", ["gather", "allgather", "broadcast", "gather_local", "allgather_local"])
@pytest.mark.parametrize("children", [0, 2])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_kill_every_rank_in_every_collective(tmp_path: Path, size: int, children: int, collective: str) -> None:
    for victim in range(size):
        kill_one(tmp_path, size, victim, collective, children=children)


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_over_tcp(tmp_path: Path, victim: int) -> None:
    kill_one(tmp_path, 3, victim, "allgather", children=0, tcp=True)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_over_tcp_with_children_that_hold_the_connection(tmp_path: Path, victim: int) -> None:
    kill_one(tmp_path, 3, victim, "allgather", children=2, tcp=True)


def outcomes(folder: Path, script: str, size: int, **env: Any) -> list[str]:
    """The last line of each rank's output."""
    with running(script, size, folder, env={"PORT": str(free_port()), **env}) as ranks:
        ranks.wait()
        return [ranks.output(rank).strip().splitlines()[-1] for rank in range(size)]


PREAMBLE = """
    import os, sys, time
    from det_core._errors import DetCoreError
    from det_core.ipc import connect
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    links = connect(rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, chief_ip=None,
                    port=int(os.environ["PORT"]))
    lane = links.lane("user")
    lane.allgather(0)
"""


def test_a_rank_that_exits_without_closing(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    if rank == 1:
        sys.exit(0)
    try:
        lane.allgather(1)
    except DetCoreError as e:
        print(type(e).__name__, e)
    links.close()
    """
    )
    with running(script, 3, tmp_path, env={"PORT": str(free_port())}) as ranks:
        assert ranks.wait() == [0, 0, 0]
        for rank in (0, 2):
            assert "PeerLost rank 1 (" in ranks.output(rank)
            assert "exited without closing its DistributedContext" in ranks.output(rank)


def test_a_forked_child_may_not_call_and_does_not_harm(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    before = sorted(os.listdir("/proc/self/fd"))
    pid = os.fork()
    if pid == 0:
        sockets = [f for f in os.listdir("/proc/self/fd") if int(f) > 2 and os.path.exists(f"/proc/self/fd/{f}")
                   and "socket" in os.readlink(f"/proc/self/fd/{f}")]
        for call in (lambda: lane.allgather(1), lambda: lane.broadcast(1), links.everyone.raise_if_broken,
                     lambda: links.everyone.post("t", 1)):
            try:
                call()
                os._exit(1)
            except DetCoreError as e:
                if type(e).__name__ != "ContextClosed":
                    os._exit(2)
        links.close()
        os._exit(10 + len(sockets))
    _, status = os.waitpid(pid, 0)
    print("child", os.waitstatus_to_exitcode(status), lane.allgather(rank))
    links.close()
    """
    )
    assert outcomes(tmp_path, script, 3) == ["child 10 [0, 1, 2]"] * 3


def test_a_death_while_others_wait_for_room(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    if rank == 1:
        print("asleep", flush=True)
        time.sleep(60)
    try:
        for number in range(100000):
            lane.broadcast(bytes(4_000_000))
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
        os._exit(0)
    """
    )
    with running(script, 2, tmp_path, env={"PORT": str(free_port())}) as ranks:
        ranks.wait_for("asleep", ranks=[1])
        time.sleep(1.0)
        assert ranks.processes[0].poll() is None
        ranks.processes[1].kill()
        assert ranks.processes[0].wait(WITHIN + 5) == 0
        assert "PeerLost rank 1 (" in ranks.output(0)


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.long)])
def test_a_sleeping_rank_loses_no_broadcast_and_the_chief_may_close_meanwhile(tmp_path: Path, seconds: int) -> None:
    script = (
        PREAMBLE
        + f"""
    if rank == 0:
        for number in range(5000):
            lane.broadcast((number, bytes(500)))
        links.close()
        print("closed", flush=True)
    else:
        if rank == 1:
            time.sleep({seconds})
        got = [lane.broadcast(None)[0] for _ in range(5000)]
        print(got == list(range(5000)), flush=True)
        links.close()
    """
    )
    assert outcomes(tmp_path, script, 3) == ["closed", "True", "True"]


def test_a_death_is_seen_where_there_are_no_pidfds(tmp_path: Path) -> None:
    """The control socket is closed in forked children, so its end alone tells."""
    script = "import os\ndel os.pidfd_open\n" + textwrap.dedent(SCRIPT)
    with running(script, 3, tmp_path, env={"PORT": str(free_port())}, args=("allgather", "2", "unix")) as ranks:
        try:
            ranks.wait_for("looping")
            killed = time.monotonic()
            ranks.processes[1].kill()
            check_others(ranks, 1, killed, WITHIN)
        finally:
            end_children(ranks)


def test_one_machine_needs_no_zmq(tmp_path: Path) -> None:
    assert outcomes(tmp_path, PREAMBLE + "    print('zmq' in sys.modules)\n    links.close()\n", 2) == [
        "False",
        "False",
    ]


def test_a_forked_child_of_a_rank_on_tcp_exits_and_harms_nobody(tmp_path: Path) -> None:
    script = (
        PREAMBLE.replace("port=", "insecure=True, force_tcp=True, port=")
        + """
    pid = os.fork()
    if pid == 0:
        try:
            lane.allgather(1)
        except DetCoreError as e:
            print(type(e).__name__, flush=True)
        sys.exit(7)
    _, status = os.waitpid(pid, 0)
    print("child", os.waitstatus_to_exitcode(status), lane.allgather(rank))
    links.close()
    """
    )
    with running(script, 2, tmp_path, env={"PORT": str(free_port())}) as ranks:
        assert ranks.wait() == [0, 0], [ranks.output(r) for r in range(2)]
        for rank in range(2):
            assert ranks.output(rank).split("\n")[:2] == ["ContextClosed", "child 7 [0, 1]"]


def test_an_exception_of_a_signal_handler_in_a_collective_leaves_nobody_hanging(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    import signal
    def handler(number, frame):
        raise KeyboardInterrupt
    try:
        if rank == 1:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        while True:
            lane.allgather(bytes(50_000))
    except (KeyboardInterrupt, DetCoreError) as e:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(type(e).__name__, e, flush=True)
        links.close(failure=e)
    """
    )
    found = outcomes(tmp_path, script, 3)
    assert found[1].startswith("KeyboardInterrupt")
    assert all("rank 1" in found[r] for r in (0, 2)), found
