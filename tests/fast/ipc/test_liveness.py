"""Death of a rank: an error on the others that names it, in any collective, with children of it alive."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from support.processes import free_port, seconds_in_the_queue, suspend
from support.ranks import Ranks, running

WITHIN = 2.0
"""Maximum time in seconds until every other rank has raised, on one node."""

SCRIPT = """
    import multiprocessing, os, sys, time
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
        at, tasks = time.monotonic(), "/proc/self/task"
        queued = sum(int(open(f"{tasks}/{task}/schedstat").read().split()[1]) for task in os.listdir(tasks)) / 1e9
        print(f"raised at {at:.3f}, queued for {queued:.3f}: {type(e).__name__}: {e}", flush=True)
        os._exit(3)
"""


def kill_one(
    folder: Path,
    size: int,
    victim: int,
    collective: str,
    *,
    children: int = 2,
    tcp: bool = False,
    delay: float = 0.05,
    before: str = "",
) -> None:
    """Kill a rank ``delay`` seconds after all are in the loop; ``before`` is code that the ranks begin with."""
    arguments = (collective, str(children), "tcp" if tcp else "unix")
    script = before + textwrap.dedent(SCRIPT)
    with running(script, size, folder, env={"PORT": str(free_port())}, args=arguments) as ranks:
        ranks.wait_for("looping")
        time.sleep(delay)
        queued = [seconds_in_the_queue(process.pid) for process in ranks.processes]
        killed = time.monotonic()
        ranks.processes[victim].kill()
        check_others(ranks, victim, killed, queued, WITHIN if not tcp else 10.0)


def check_others(ranks: Ranks, victim: int, killed: float, queued: list[float], within: float) -> None:
    """Check that each other rank raised in time, less its time in the run queue since then."""
    pid = ranks.processes[victim].pid
    for rank, process in enumerate(ranks.processes):
        if rank == victim:
            continue
        status = process.wait()
        match = re.search(r"raised at ([\d.]+), queued for ([\d.]+): (.*)", ranks.output(rank))
        assert status == 3 and match, ranks.output(rank)
        at, waited, error = float(match[1]), float(match[2]) - queued[rank], match[3]
        assert error.startswith("PeerLost: ") and f"rank {victim} (host" in error and f"pid {pid}" in error, error
        assert "last known call" in error
        assert at - killed - waited < within, f"rank {rank} took {at - killed:.2f} s, {waited:.2f} of them in the queue"


@pytest.mark.parametrize(  # every rank in every collective: tests/long/test_ipc_liveness.py
    "size, victim, collective",
    [
        (2, 0, "broadcast"),
        (2, 1, "gather"),
        (4, 0, "gather"),
        (4, 0, "allgather"),
        (4, 2, "allgather"),
        (4, 2, "broadcast"),
    ],
)
def test_kill_with_children_alive_raises_peer_lost_on_the_others(
    tmp_path: Path, size: int, victim: int, collective: str
) -> None:
    kill_one(tmp_path, size, victim, collective)


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_over_tcp_raises_peer_lost_on_the_others(tmp_path: Path, victim: int) -> None:
    kill_one(tmp_path, 3, victim, "allgather", children=0, tcp=True)


def outcomes(folder: Path, script: str, size: int, **env: Any) -> list[str]:
    """Run a script on each rank, and return the last line of each output."""
    with running(script, size, folder, env={"PORT": str(free_port()), **env}) as ranks:
        ranks.wait()
        return [ranks.output(rank).strip().splitlines()[-1] for rank in range(size)]


PREAMBLE = """
    import os, sys, threading, time
    from det_core.errors import DetCoreError
    from det_core.ipc import connect
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    communicators = connect(
        rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, chief_ip=None,
        port=int(os.environ["PORT"]))
    channel = communicators.channel("user")
    channel.allgather(0)
"""


SUSPENDED = """
    communicators.close()  # of PREAMBLE
    from det_core.ipc import _membership
    tcp = sys.argv[1] == "tcp"
    _membership.WARN_AFTER = 9.0 if tcp else 1.5
    communicators = connect(
        rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, chief_ip=None,
        port=int(os.environ["PORT"]), force_tcp=tcp, insecure=tcp)
    channel = communicators.channel("user")
    channel.allgather(0)  # the last known call
    print("ready", flush=True)
    for turn in range(10**9):
        if channel.allgather(os.path.exists("stop"))[0]:
            break
    print("over", flush=True)
    communicators.close()
"""


@pytest.mark.parametrize(("stopped", "link"), [(0, "unix"), (2, "unix"), (0, "tcp"), (2, "tcp")])
def test_suspended_rank_is_named_once_and_so_is_its_return(
    tmp_path: Path, stopped: int, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning comes after 1.5 seconds instead of ten.

    Over TCP after nine: ZMQ's heartbeats once took the rank for dead after six.
    """
    monkeypatch.chdir(tmp_path)
    others = [rank for rank in range(3) if rank != stopped]
    with running(PREAMBLE + SUSPENDED, 3, tmp_path, env={"PORT": str(free_port())}, args=(link,)) as ranks:
        ranks.wait_for("ready")
        suspend(ranks.processes[stopped].pid)
        ranks.wait_for("has waited for", ranks=others)
        os.kill(ranks.processes[stopped].pid, signal.SIGCONT)
        ranks.wait_for("responded after", ranks=others)
        (tmp_path / "stop").touch()
        assert ranks.wait() == [0, 0, 0]
        for rank in others:
            output = ranks.output(rank)
            words = re.findall(r"has waited for|responded after", output)  # a busy machine may keep others waiting, too
            assert words == ["has waited for", "responded after"] * (len(words) // 2), "once for each wait"
            assert re.search(rf"has waited for .* for rank {stopped} \(.*last known call: allgather \(call", output)


@pytest.mark.parametrize(("size", "dies", "late", "moment"), [(8, 5, 1, 2), (4, 1, 2, 3)], ids=["job", "node"])
def test_dead_rank_is_named_on_other_nodes_before_the_chief_can_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, dies: int, late: int, moment: int
) -> None:
    """A late rank does not read, so the chief's notice of the death stays in a queue that would end with the chief.

    In the second case the dead rank is on the chief's node, and the chief waits for it in a collective there: its
    two communicators detect the death in a thread each, here that of the job first, which is slow to notify.
    """
    monkeypatch.chdir(tmp_path)
    two_nodes = "local_rank=rank % 2, local_size=2, cross_rank=rank // 2, cross_size=2, chief_ip='127.0.0.1'"
    one_node = "local_rank=rank, local_size=size, cross_rank=0, cross_size=1, chief_ip=None"
    preamble = (
        PREAMBLE.replace(one_node, two_nodes) if size == 4 else PREAMBLE.replace("port=", "force_tcp=True, port=")
    )
    script = (
        preamble.replace("port=", "insecure=True, port=")
        + f"""
    from det_core.ipc import _membership
    _membership.ABORT_NOTICE_TIMEOUT = 600.0  # however slow the host is
    if rank == 0 and size == 4:
        job_begins, send_with_ack = threading.Event(), _membership.Peer.send_with_ack

        def send_slowly(peer, data):
            if peer.data is None:  # on another node
                job_begins.set()
                time.sleep(0.5)
            send_with_ack(peer, data)

        _membership.Peer.send_with_ack = send_slowly
        communicators.local.call_soon(job_begins.wait)
    local = communicators.local_channel("user")
    local.allgather(0)
    print("ready", flush=True)
    try:
        if rank == 0:
            while not os.path.exists("suspended"):
                time.sleep(0.01)
            channel.broadcast(bytes(30_000_000))
            print("sent", flush=True)
            if size == 4:
                local.allgather(1)
        while True:
            communicators.all_ranks.raise_if_aborted()
            time.sleep(0.001)
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
        if rank == {moment}:
            time.sleep(0.5)  # long enough for a chief that does not wait to be gone
            print("a moment later", flush=True)
        os._exit(0)
    """
    )
    with running(script, size, tmp_path, env={"PORT": str(free_port())}) as ranks:
        ranks.wait_for("ready")
        suspend(ranks.processes[late].pid)
        (tmp_path / "suspended").touch()
        ranks.wait_for("sent", ranks=[0])
        ranks.processes[dies].kill()
        ranks.wait_for("a moment later", ranks=[moment])
        os.kill(ranks.processes[late].pid, signal.SIGCONT)
        for rank in {*range(size)} - {dies}:
            assert ranks.processes[rank].wait() == 0
            assert f"PeerLost rank {dies} (" in ranks.output(rank), ranks.output(rank)


def test_dead_rank_with_unread_messages_is_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chief's ipc thread detects the death before it has read the messages, which take several reads."""
    monkeypatch.chdir(tmp_path)
    script = (
        PREAMBLE
        + """
    from det_core.ipc._membership import AbortReason

    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    if rank == 1:
        wait_for("busy")
        for number in range(2):
            communicators.all_ranks.post("number", bytes(70_000))
        communicators.all_ranks.abort(AbortReason("mismatch", "the last message"), wait=False)
        print("sent", communicators.all_ranks.peers[0].queued, flush=True)
        time.sleep(600)
    communicators.all_ranks.call_soon(lambda: (open("busy", "w"), wait_for("dead")))
    try:
        channel.allgather(1)
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
    """
    )
    with running(script, 2, tmp_path, env={"PORT": str(free_port())}) as ranks:
        ranks.wait_for("sent 0", ranks=[1])
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        (tmp_path / "dead").touch()
        ranks.processes[0].wait()
        assert ranks.output(0) == "CollectiveMismatch the last message\n"


def test_dead_chief_whose_lifeline_ends_first_is_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of one connection of the dead process is detected before the messages of the other are read."""
    monkeypatch.chdir(tmp_path)
    elsewhere = "local_rank=0, local_size=1, cross_rank=rank, cross_size=2, chief_ip='127.0.0.1', insecure=True"
    begin, _, connected = PREAMBLE.partition("    communicators = connect(")
    script = (
        begin
        + """
    from det_core.ipc._membership import AbortReason
    from det_core.ipc._zmq_link import ZmqSocket
    serve, connections = ZmqSocket.receive_all, []

    def serve_lifeline_first(connection):
        if connection not in connections:
            connections.append(connection)
        if connection is connections[0] and os.path.exists("held"):
            if connection._ready(connection._socket):
                print("arrived", flush=True)
            if connections[1]._inodes:
                return
        serve(connection)

    if rank == 1:
        ZmqSocket.receive_all = serve_lifeline_first
    communicators = connect("""
        + connected.replace("local_rank=rank, local_size=size, cross_rank=0, cross_size=1, chief_ip=None", elsewhere)
        + """
    if rank == 1:
        open("held", "w").close()
    while not os.path.exists("held"):
        time.sleep(0.01)
    if rank == 0:
        communicators.all_ranks.abort(AbortReason("mismatch", "the last message"), wait=False)
        time.sleep(600)
    try:
        channel.allgather(1)
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
        os._exit(0)
    """
    )
    with running(script, 2, tmp_path, env={"PORT": str(free_port())}) as ranks:
        ranks.wait_for("arrived", ranks=[1])
        ranks.processes[0].kill()
        assert ranks.processes[1].wait() == 0
        assert ranks.output(1).endswith("CollectiveMismatch the last message\n"), ranks.output(1)


def test_exit_without_close_is_named_on_the_others(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    if rank == 1:
        sys.exit(0)
    try:
        channel.allgather(1)
    except DetCoreError as e:
        print(type(e).__name__, e)
    communicators.close()
    """
    )
    with running(script, 3, tmp_path, env={"PORT": str(free_port())}) as ranks:
        assert ranks.wait() == [0, 0, 0]
        for rank in (0, 2):
            assert "PeerLost rank 1 (" in ranks.output(rank)
            assert "exited without closing its DistributedContext" in ranks.output(rank)


def test_forked_child_cannot_call_and_harms_nobody(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    before = sorted(os.listdir("/proc/self/fd"))
    pid = os.fork()
    if pid == 0:
        sockets = [f for f in os.listdir("/proc/self/fd") if int(f) > 2 and os.path.exists(f"/proc/self/fd/{f}")
                   and "socket" in os.readlink(f"/proc/self/fd/{f}")]
        for call in (lambda: channel.allgather(1), lambda: channel.broadcast(1),
                     communicators.all_ranks.raise_if_aborted, lambda: communicators.all_ranks.post("t", 1)):
            try:
                call()
                os._exit(1)
            except DetCoreError as e:
                if type(e).__name__ != "ContextClosed":
                    os._exit(2)
        communicators.close()
        os._exit(10 + len(sockets))
    _, status = os.waitpid(pid, 0)
    print("child", os.waitstatus_to_exitcode(status), channel.allgather(rank))
    communicators.close()
    """
    )
    assert outcomes(tmp_path, script, 3) == ["child 10 [0, 1, 2]"] * 3


def test_death_while_the_chief_waits_for_credit_raises_peer_lost(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    if rank == 1:
        print("asleep", flush=True)
        time.sleep(60)
    import threading
    def watch(main):
        def waits(frame):
            return frame is not None and (frame.f_code.co_name == "_wait_for_credit" or waits(frame.f_back))
        while not waits(sys._current_frames()[main]):
            time.sleep(0.01)
        print("waits for credit", flush=True)
    threading.Thread(target=watch, args=(threading.get_ident(),), daemon=True).start()
    try:
        for number in range(100000):
            channel.broadcast(bytes(4_000_000))
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
        os._exit(0)
    """
    )
    with running(script, 2, tmp_path, env={"PORT": str(free_port())}) as ranks:
        ranks.wait_for("asleep", ranks=[1])
        ranks.wait_for("waits for credit", ranks=[0])
        ranks.processes[1].kill()
        assert ranks.processes[0].wait() == 0
        assert "PeerLost rank 1 (" in ranks.output(0)


def test_sleeping_rank_loses_no_broadcast_of_a_chief_that_closes(tmp_path: Path) -> None:
    sleep_while_the_chief_closes(tmp_path, seconds=1)


def sleep_while_the_chief_closes(tmp_path: Path, seconds: int) -> None:
    script = (
        PREAMBLE
        + f"""
    if rank == 0:
        for number in range(5000):
            channel.broadcast((number, bytes(500)))
        communicators.close()
        print("closed", flush=True)
    else:
        if rank == 1:
            time.sleep({seconds})
        got = [channel.broadcast(None)[0] for _ in range(5000)]
        print(got == list(range(5000)), flush=True)
        communicators.close()
    """
    )
    assert outcomes(tmp_path, script, 3) == ["closed", "True", "True"]


def test_kill_without_pidfds_raises_peer_lost_on_the_others(tmp_path: Path) -> None:
    """Forked children close the control socket, so its end is that of the process."""
    kill_one(tmp_path, 3, 1, "allgather", before="import os\ndel os.pidfd_open\n")


def test_single_node_imports_no_zmq(tmp_path: Path) -> None:
    assert outcomes(tmp_path, PREAMBLE + "    print('zmq' in sys.modules)\n    communicators.close()\n", 2) == [
        "False",
        "False",
    ]


def test_forked_child_over_tcp_exits_and_harms_nobody(tmp_path: Path) -> None:
    script = (
        PREAMBLE.replace("port=", "insecure=True, force_tcp=True, port=")
        + """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
    pid = os.fork()
    if pid == 0:
        try:
            channel.allgather(1)
        except DetCoreError as e:
            print(type(e).__name__, flush=True)
        sys.exit(7)
    _, status = os.waitpid(pid, 0)
    print("child", os.waitstatus_to_exitcode(status), channel.allgather(rank))
    communicators.close()
    """
    )
    with running(script, 2, tmp_path, env={"PORT": str(free_port())}) as ranks:
        assert ranks.wait() == [0, 0], [ranks.output(r) for r in range(2)]
        for rank in range(2):
            assert ranks.output(rank).split("\n")[:2] == ["ContextClosed", "child 7 [0, 1]"]


def test_exception_of_a_signal_handler_in_a_collective_ends_all_ranks(tmp_path: Path) -> None:
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
            channel.allgather(bytes(50_000))
    except (KeyboardInterrupt, DetCoreError) as e:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(type(e).__name__, e, flush=True)
        communicators.close(failure=e)
    """
    )
    found = outcomes(tmp_path, script, 3)
    assert found[1].startswith("KeyboardInterrupt")
    assert all("rank 1" in found[r] for r in (0, 2)), found
