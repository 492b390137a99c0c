"""Launchers of several nodes: a failure on one of them ends the job on all, with the root cause's name and status."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import det_core
from det_core.launch._hosts import Host, Layout
from det_core.launch._links import Link, _Peer
from det_core.launch._outcome import RankOutcome
from support.launcher import TORCH, Launched, launched, write
from support.processes import free_port, suspend, until

SECRET = "a secret of several nodes"
FAILS = """
    import os, sys, time
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.02)
    if os.environ["RANK"] == sys.argv[1]:
        sys.exit(7)
    time.sleep(600)
"""
ENDS = """
    import os, time
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.02)
"""
STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    if os.environ["RANK"] == "0":
        sys.exit(7)
    time.sleep(600)
"""
RAISES = """
    import sys, time
    from det_core import core
    with core.DistributedContext.from_torch_distributed() as d:
        d.allgather(0)
        if d.rank == 2:
            print("this is why")
            raise ArithmeticError("the loss is not a number")
        d.allgather(1)
"""


class Nodes:
    """Launchers with two ranks each on one machine, configured as several nodes."""

    def __init__(self, folder: Path, stack: ExitStack, count: int = 3) -> None:
        self._folder, self._stack, self._count = folder, stack, count
        self._ports = ["--master-port", str(free_port()), "--launcher-port", str(free_port())]
        self._env = {"INTER_TRAIN_PROCESS_COMM_PORT_1": str(free_port())}
        self.jobs: list[Launched] = []

    def start(self, *words: str, secret: str = SECRET, ranks: int = 2) -> Launched:
        """Start the next node's launcher."""
        place = ["--nnodes", str(self._count), "--node-rank", str(len(self.jobs)), "--master-addr", "127.0.0.1"]
        command = [*TORCH, *place, *self._ports, "--nproc-per-node", str(ranks), "--grace", "20", *words]
        job = launched(command, folder=self._folder, DET_CORE_SECRET=secret, **self._env)
        self.jobs.append(self._stack.enter_context(job))
        return self.jobs[-1]

    def start_all(self, *words: str) -> None:
        """Start all, and wait until they run."""
        for _ in range(self._count):
            self.start(*words)
        for job in self.jobs:
            job.wait_for("ready", times=2)

    def wait_until_linked(self) -> None:
        """Wait until node 0 has linked with all others."""
        self.jobs[0].wait_for("linked with")

    def ends(self) -> list[int]:
        """Return the statuses of all, and check that no process is left."""
        statuses = [job.wait() for job in self.jobs]
        for job in self.jobs:
            job.nothing_left()
        return statuses


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack, count=2)


@pytest.mark.parametrize("rank", [0, 3])
def test_failed_rank_ends_all_nodes_with_its_name_and_status(nodes: Nodes, tmp_path: Path, rank: int) -> None:
    nodes.start_all(write(tmp_path, "fails.py", FAILS), str(rank))
    (tmp_path / "go").touch()
    assert nodes.ends() == [7, 7, 7], [job.err for job in nodes.jobs]
    for node, job in enumerate(nodes.jobs):
        assert len(re.findall(rf"\[launcher\] rank {rank} \(.*\) failed first, with status 7", job.err)) == 1
        assert len(re.findall(r"\[launcher\] rank \d .*killed by SIGTERM", job.err)) == 2 - (node == rank // 2), job.err
        notices = re.findall(rf"\[launcher\] rank {rank} \(.*\) failed with status 7: the job ends here too", job.err)
        assert len(notices) == (node != rank // 2)


@pytest.mark.parametrize(("node", "victim"), [(0, "launcher"), (1, "supervisor")])
def test_lost_node_ends_all(nodes: Nodes, tmp_path: Path, node: int, victim: str) -> None:
    nodes.start_all(write(tmp_path, "fails.py", FAILS), "none")
    nodes.wait_until_linked()
    lost = nodes.jobs[node]
    os.kill(lost.pid if victim == "launcher" else lost.supervisor(), signal.SIGKILL)
    assert [status for at, status in enumerate(nodes.ends()) if at != node] == [1, 1]
    for job in nodes.jobs[:node] + nodes.jobs[node + 1 :]:
        assert re.search(rf"node {node} \(.*\) was lost: its launcher has died or does not answer", job.err), job.err


def test_suspended_node_is_lost(two_nodes: Nodes, tmp_path: Path) -> None:
    two_nodes.start_all(write(tmp_path, "fails.py", FAILS), "none")
    two_nodes.wait_until_linked()
    first, suspended = two_nodes.jobs
    supervisor = suspended.supervisor()
    suspend(supervisor)
    try:
        assert first.wait() == 1
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert "node 1 (" in first.err
    assert two_nodes.ends() == [1, 1]


def test_node_that_links_late_receives_earlier_failures(two_nodes: Nodes, tmp_path: Path) -> None:
    script = write(tmp_path, "stubborn.py", STUBBORN)
    two_nodes.start("--grace", "600", script).wait_for("ready", times=2)
    two_nodes.start(write(tmp_path, "ends.py", ENDS))
    assert two_nodes.jobs[1].wait() == 7
    assert two_nodes.jobs[0].process.poll() is None, "its other rank has its grace"


def test_signal_to_one_node_ends_all(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start_all(write(tmp_path, "fails.py", FAILS), "none")
    nodes.wait_until_linked()
    os.kill(nodes.jobs[1].pid, signal.SIGTERM)
    assert nodes.ends() == [143, 143, 143]
    assert "ranks 2, 3 ended by SIGTERM, which has no handler" in nodes.jobs[1].err
    assert re.search(r"rank [23] \(.*\) failed first, killed by SIGTERM\n", nodes.jobs[0].err)


def test_node_0_stays_until_the_others_have_ended(two_nodes: Nodes, tmp_path: Path) -> None:
    first = two_nodes.start(write(tmp_path, "ends.py", ENDS.replace('"go"', '"end"')))
    two_nodes.start(write(tmp_path, "fails.py", FAILS), "3").wait_for("ready", times=2)
    two_nodes.wait_until_linked()
    (tmp_path / "end").touch()
    until(lambda: len(first.processes()) == 2)  # launcher and supervisor
    (tmp_path / "go").touch()
    first.wait_for(r"\[launcher\] rank 3 \(.*\) failed with status 7: the job ends here too")
    assert two_nodes.ends() == [7, 7]


def test_nodes_that_succeed_end_with_0(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start_all(write(tmp_path, "ends.py", ENDS))
    nodes.wait_until_linked()
    (tmp_path / "go").touch()
    assert nodes.ends() == [0, 0, 0]
    assert [job.err for job in nodes.jobs] == ["[launcher] linked with 2 other nodes\n", "", ""]


def test_root_cause_is_named_where_its_peers_end_before_it(two_nodes: Nodes, tmp_path: Path) -> None:
    for _ in range(2):
        two_nodes.start(write(tmp_path, "raises.py", RAISES))
    assert two_nodes.ends() == [1, 1]
    for job in two_nodes.jobs:
        (first,) = re.findall(r"\[launcher\] rank (\d) \(.*\) failed first, with status 1", job.err)
        assert first == "2", job.err
    assert "failed first, with status 1; its last lines:\n[rank=2] this is why" in two_nodes.jobs[1].err
    assert two_nodes.jobs[0].err.count("PeerLost: rank 2 ") >= 2


def test_nodes_of_unequal_size_end_with_a_remedy(two_nodes: Nodes, tmp_path: Path) -> None:
    for ranks in (1, 2):
        two_nodes.start(write(tmp_path, "fails.py", FAILS), "none", ranks=ranks)
    assert two_nodes.ends() == [1, 1]
    for job in two_nodes.jobs:
        assert re.search(r"node 1 .*expects 4 ranks, this one 2: pass --nproc-per-node", job.err)


def test_nodes_without_a_secret_run_unlinked_with_a_warning(two_nodes: Nodes, tmp_path: Path) -> None:
    for _ in range(2):
        two_nodes.start(write(tmp_path, "ends.py", ENDS), secret="").wait_for("ready", times=2)
    (tmp_path / "go").touch()
    assert two_nodes.ends() == [0, 0]
    warning = r"\[launcher\] DET_CORE_SECRET is not set: .* on each node.*\n"
    command = r"\[launcher\]     export DET_CORE_SECRET=[0-9a-f]{64}\n"
    assert re.fullmatch(warning + command, two_nodes.jobs[0].err), two_nodes.jobs[0].err
    assert re.fullmatch(warning, two_nodes.jobs[1].err), two_nodes.jobs[1].err


def test_other_secret_is_named_on_both_sides_and_a_second_try_joins(two_nodes: Nodes, tmp_path: Path) -> None:
    script = write(tmp_path, "ends.py", ENDS)
    first = two_nodes.start(script)
    refused = two_nodes.start(script, secret="the secret of another job")
    assert refused.wait() == 1
    refused.nothing_left()
    assert re.search(r"node 0 \(127.0.0.1\) has another DET_CORE_SECRET: set the same on each node", refused.err)
    first.wait_for(r"\[launcher\] a launcher at \S*127.0.0.1 has another DET_CORE_SECRET: set the same on each node")
    two_nodes.jobs.remove(refused)
    two_nodes.start(script)
    (tmp_path / "go").touch()
    assert two_nodes.ends() == [0, 0], [job.err for job in two_nodes.jobs]


def test_launcher_port_in_use_ends_the_job(tmp_path: Path) -> None:
    write(tmp_path, "ends.py", ENDS)
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = str(used.getsockname()[1])
        place = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        with launched(
            TORCH, *place, "--launcher-port", port, "ends.py", folder=tmp_path, DET_CORE_SECRET=SECRET
        ) as job:
            assert job.wait() == 1, "others could not join it, and would end at the deadline"
            job.wait_for(rf"cannot link.* port {port} cannot be used \(.*\); pass another --launcher-port")


@pytest.mark.parametrize("node", [0, 1])
def test_launcher_that_cannot_start_ends_all(two_nodes: Nodes, tmp_path: Path, node: int) -> None:
    script = write(tmp_path, "fails.py", FAILS)
    for number in range(2):
        two_nodes.start("nowhere.py" if number == node else script, "none")
    assert two_nodes.ends() == [2, 2], [job.err for job in two_nodes.jobs]
    for number, job in enumerate(two_nodes.jobs):
        assert re.search(rf"node {node} \(.*\) could not start: the script nowhere.py does not exist", job.err)
        assert ("the job ends here too" in job.err) == (number != node)


def test_master_port_in_use_ends_all(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack, count=2)
        used = stack.enter_context(socket.socket())
        used.bind(("", int(nodes._ports[1])))
        used.listen()
        for _ in range(2):
            nodes.start(write(tmp_path, "fails.py", FAILS), "none")
        assert nodes.ends() == [1, 1]
    assert re.search(r"node 0 \(.*\) could not start: port \d+ is in use", nodes.jobs[1].err)


def test_rank_that_fails_before_others_have_linked_ends_them(two_nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    script = write(tmp_path, "fails.py", FAILS)
    first = two_nodes.start(script, "0")
    first.wait_for("20 s for 1 other rank to end")
    until(lambda: len(first.processes()) == 2)  # launcher and supervisor
    two_nodes.start(script, "0")
    assert two_nodes.ends() == [7, 7], [job.err for job in two_nodes.jobs]


@pytest.mark.parametrize("node", [0, 1])
def test_node_that_does_not_link_is_named_and_ends_the_job_at_the_deadline(tmp_path: Path, node: int) -> None:
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1"]
    ports = ["--master-port", str(free_port()), "--launcher-port", (port := str(free_port()))]
    command = [*TORCH, *place, *ports, "--link-timeout", "1"]
    script = write(tmp_path, "fails.py", FAILS)
    with launched(command, script, "none", folder=tmp_path, DET_CORE_SECRET=SECRET) as job:
        assert job.wait() == 1
        job.nothing_left()
    if node:
        assert f"node 0's launcher does not answer at 127.0.0.1:{port}; the job ends if that is so after 1" in job.err
        assert f"node 0 (127.0.0.1) did not answer at 127.0.0.1:{port} within 1 s: the job ends here too" in job.err
    else:
        assert f"not linked yet: node 1; they connect to 127.0.0.1:{port}; the job ends" in job.err
        assert re.search(r"node 1 \(.*\) did not link within 1 s: the job ends here too", job.err)


def test_signal_to_node_0_alone_shows_no_internals(two_nodes: Nodes, tmp_path: Path) -> None:
    two_nodes.start_all(write(tmp_path, "fails.py", FAILS), "none")
    two_nodes.wait_until_linked()
    os.kill(two_nodes.jobs[0].pid, signal.SIGTERM)
    assert two_nodes.ends() == [143, 143], [job.err for job in two_nodes.jobs]
    for job in two_nodes.jobs:
        assert not re.search("asyncio|Task|Cancelled|link to other nodes", job.err), job.err
        assert "failed killed" not in job.err
    assert re.search(r"rank [01] \(.*\) was killed by SIGTERM: the job ends here too", two_nodes.jobs[1].err)


TWO_NODES = Layout("a test", (Host("127.0.0.1", 1), Host("h", 1)))


@contextmanager
def listening() -> Iterator[tuple[Link, int]]:
    """Run the link of node 0 in this process; yield it and its port."""
    port = free_port()
    link = Link(TWO_NODES, port, SECRET)
    link.start()
    until(lambda: _answers(port))
    try:
        yield link, port
    finally:
        link.leave()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def next_news(link: Link) -> list[RankOutcome | str]:
    """Wait for news and return it."""
    while True:
        select.select([link.fd], [], [])
        if news := link.receive():
            return news


@asynccontextmanager
async def authenticated(port: int, version: str = det_core.__version__) -> AsyncIterator[_Peer]:
    """Connect and authenticate as another node."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    peer = _Peer(reader, writer)
    await peer.authenticate(SECRET.encode())
    peer.send("hello", node=1, host="h", size=2, version=version)
    yield peer
    peer.close()
    await writer.wait_closed()


def test_strangers_do_not_disturb_the_link() -> None:
    with listening() as (link, port):
        for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, os.urandom(64)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(rubbish)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        assert link.others == {} and link.failed() == []

        async def comes() -> None:
            async with authenticated(port) as peer:
                peer.send("failed", **RankOutcome(5, 77, 3, host="h", node=1).to_message())
                assert (await peer.read())["kind"] == "beat"

        asyncio.run(comes())
        entries: list[RankOutcome | str] = []
        while len(entries) < 3:
            entries += next_news(link)
        notice, linked, news = entries[:3]  # another may report the loss of the node, which left without a goodbye
        assert notice == "a launcher at 127.0.0.1 has another DET_CORE_SECRET: set the same on each node"
        assert linked == "linked with 1 other node"
        assert isinstance(news, RankOutcome) and (news.rank, news.status, news.node) == (5, 3, 1)


def test_duplicate_node_is_rejected_with_a_remedy() -> None:
    async def comes(port: int) -> None:
        async with authenticated(port) as first:
            await first.read()
            async with authenticated(port) as second:
                message = await second.read()
                assert message["kind"] == "failed" and "give each its own --node-rank" in message["words"]
                assert (await second.read())["kind"] == "bye"
            first.send("bye")

    with listening() as (link, port):
        asyncio.run(comes(port))
        assert link.failed() == []
        entries: list[RankOutcome | str] = []
        while len(entries) < 2:
            entries += next_news(link)
        assert re.match(r"node 1 \(h\) cannot join, as another launcher is node 1: ", str(entries[1]))


def test_altered_message_ends_the_link() -> None:
    async def comes(port: int) -> None:
        async with authenticated(port) as peer:
            await peer.read()
            peer._sent += 1  # as if one were left out
            peer.send("bye")
            with pytest.raises(EOFError):
                while True:
                    await peer.read()

    with listening() as (link, port):
        asyncio.run(comes(port))
        entries: list[RankOutcome | str] = []
        while len(entries) < 2:
            entries += next_news(link)
        news = entries[1]  # the first reports that it has linked
        assert isinstance(news, RankOutcome) and news.name == "node 1 (h)" and "was lost" in news.ending


def test_stranger_without_the_secret_receives_no_proof() -> None:
    with listening() as (_, port), socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(os.urandom(64))  # a nonce, and an invalid proof
        answer = b""
        while piece := stranger.recv(4096):
            answer += piece
        assert len(answer) == 64 and answer[32:] == bytes(32)


def test_other_version_is_named_on_both_sides() -> None:
    async def comes(port: int) -> None:
        async with authenticated(port, version="0.0.1") as peer:
            while (message := await peer.read())["kind"] != "failed":
                pass
            assert "has det_core 0.0.1, and node 0 " in message["words"]
            peer.send("bye")

    with listening() as (link, port):
        asyncio.run(comes(port))
        (news,) = link.failed()
    assert news.description.endswith(f"{det_core.__version__}: install the same on each") and news.node == 1


def test_knows_failure_of_a_rank_of_a_lost_node() -> None:
    layout = Layout("a test", (Host("127.0.0.1", 2), Host("a", 2), Host("b", 2)), node_rank=1)
    link = Link(layout, free_port(), SECRET)
    link.start()
    try:
        assert not link.knows_failure_of(4)
        link.send_failure(RankOutcome(None, status=1, description="was lost", host="b", node=2))
        until(lambda: link.failed())
        assert link.knows_failure_of(4) and link.knows_failure_of(5) and not link.knows_failure_of(0)
    finally:
        link.leave()
