"""Links between nodes: authentication, refusals, loss, and the same collectives over them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from det_core.errors import CollectiveMismatch, PeerLost, RendezvousError
from det_core.ipc import Communicators, connect
from det_core.ipc._join import _RemoteJoin
from det_core.ipc._zmq_link import ZmqSocket
from fast.ipc.conftest import CALL, HELLO, finish, frame, started
from support.processes import until

AsRanks = Callable[..., Any]
ConfigOf = Callable[..., dict[str, Any]]
TCP: list[dict[str, Any]] = [
    {"force_tcp": True, "secret": "s"},
    {"force_tcp": True, "insecure": True},
    {"nodes": 2, "secret": "s"},
    {"nodes": 2, "secret": "s", "force_tcp": True},
]


MALFORMED = [
    [b""],
    [b"x" * 100],
    [frame(CALL, b"")[:-8], b"12345678901"],
    [frame(HELLO, b"x")[:-3]],
    [frame(HELLO, b"x" * 65_537)],
    [frame(CALL, b"cos\nsystem\n(S'true'\ntR.")],
    [frame(HELLO, b"not json")],
]


def test_rendezvous_over_tcp_ignores_malformed_messages(rank_config: ConfigOf) -> None:
    arguments = {"force_tcp": True, "insecure": True}
    chief = started(rank_config(0, 2, **arguments))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://127.0.0.1:{rank_config(0, 2)['port']}")
        for parts in MALFORMED:
            stranger.send_multipart(parts)
        stranger.send(frame(HELLO, json.dumps({"rank": 1, "size": 3, "host": "h", "pid": 1, "protocol": 0}).encode()))
        assert b"protocol" in stranger.recv()  # all messages before the refused one were read
        assert all(isinstance(o, Communicators) for o in finish(chief, started(rank_config(1, 2, **arguments))))


def test_hello_from_an_admitted_worker_is_ignored(as_ranks: AsRanks) -> None:
    """ZMQ sends over the next connection what the last one, to a chief that was ending, left unsent."""

    def work(communicators: Communicators) -> Any:
        communicator = communicators.all_ranks
        if communicator.rank:
            communicator.peers[0].control.send(frame(HELLO, b"whatever", rank=communicator.rank))
        return [communicators.channel("user").allgather(communicator.rank) for _ in range(3)]

    assert as_ranks(2, work, force_tcp=True, insecure=True).values() == [[[0, 1]] * 3] * 2


@pytest.mark.parametrize("arguments", TCP)
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_over_tcp_returns_the_same(as_ranks: AsRanks, size: int, arguments: dict[str, Any]) -> None:
    def work(communicators: Communicators) -> Any:
        channel, rank = communicators.channel("user"), communicators.all_ranks.rank
        out = []
        for turn in range(3):
            out.append((channel.gather((rank, turn)), channel.allgather(rank), channel.broadcast((rank, turn))))
        array = channel.broadcast(np.arange(500_000.0) if rank == 0 else None)
        array[0] += rank
        return out, array.sum() - rank, communicators.local_channel("user").allgather(rank)

    for rank, (out, total, _) in enumerate(as_ranks(size, work, **arguments).values()):
        assert total == np.arange(500_000.0).sum()
        for turn, (gathered, everybody, broadcast) in enumerate(out):
            assert gathered == ([(r, turn) for r in range(size)] if rank == 0 else None)
            assert everybody == list(range(size)) and broadcast == (0, turn)


def test_chief_that_answers_before_connect_returns(as_ranks: AsRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ZmqSocket.connect

    def connect_slowly(self: ZmqSocket, *arguments: Any, **keywords: Any) -> None:
        real(self, *arguments, **keywords)
        shaken.wait()  # the ipc thread has its first event before this returns

    shaken = threading.Event()
    say_hello = _RemoteJoin._say_hello

    def note(self: _RemoteJoin) -> None:
        shaken.set()
        say_hello(self)

    monkeypatch.setattr(ZmqSocket, "connect", connect_slowly)
    monkeypatch.setattr(_RemoteJoin, "_say_hello", note)

    def work(communicators: Communicators) -> Any:
        return communicators.channel("user").allgather(communicators.all_ranks.rank)

    assert as_ranks(2, work, force_tcp=True, secret="s").values() == [[0, 1]] * 2


@pytest.mark.parametrize("arguments", TCP)
def test_different_calls_over_tcp_raise_mismatch(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        return channel.broadcast(1) if communicators.all_ranks.rank == 3 else channel.allgather(0)

    for outcome in as_ranks(4, work, **arguments):
        assert isinstance(outcome, CollectiveMismatch) and "rank 3 called broadcast (call 1)" in str(outcome)


def test_several_nodes_without_a_secret_raise_with_the_commands_to_type(rank_config: ConfigOf) -> None:
    with pytest.raises(RendezvousError, match="export DET_CORE_SECRET=") as caught:
        connect(**rank_config(0, 4, nodes=2))
    assert "openssl rand" in str(caught.value) and "insecure=True" in str(caught.value)
    with pytest.raises(RendezvousError, match="export DET_CORE_SECRET="):
        connect(**rank_config(1, 2, force_tcp=True))


def test_worker_with_another_secret_is_refused_and_the_job_starts(rank_config: ConfigOf) -> None:
    outcomes: list[Any] = [None, None, None]

    def run(index: int, rank: int, secret: str) -> None:
        try:
            outcomes[index] = connect(**rank_config(rank, 2, force_tcp=True, secret=secret))
        except RendezvousError as e:
            outcomes[index] = e

    def start(*arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        thread.start()
        return thread

    chief, stranger = start(0, 0, "right"), start(1, 1, "wrong")
    stranger.join()
    assert isinstance(outcomes[1], RendezvousError) and "DET_CORE_SECRET" in str(outcomes[1])
    assert chief.is_alive()
    worker = start(2, 1, "right")
    for thread in (chief, worker):
        thread.join()
    closing = [threading.Thread(target=o.close) for o in (outcomes[0], outcomes[2])]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def test_refusals_over_tcp_give_their_reason(rank_config: ConfigOf) -> None:
    arguments = {"force_tcp": True, "secret": "s"}
    chief = started(rank_config(0, 3, **arguments))
    both = [started(rank_config(1, 3, **arguments)) for _ in "ab"]
    until(lambda: any(out for _, out in both))  # the later of them is refused
    first, (_, (twice,)) = sorted(both, key=lambda each: len(each[1]))
    larger, job = finish(
        started(rank_config(2, 4, **arguments)), started(rank_config(2, 3, job=("another",), **arguments))
    )
    for refused, why in ((twice, "rank 1 is already connected"), (larger, "size=4"), (job, "another job")):
        assert isinstance(refused, RendezvousError) and why in str(refused)
    assert all(isinstance(o, Communicators) for o in finish(chief, first, started(rank_config(2, 3, **arguments))))


def test_taken_port_raises_with_the_way_to_another(rank_config: ConfigOf) -> None:
    import socket

    arguments = rank_config(0, 2, force_tcp=True, secret="s")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", arguments["port"]))
        taken.listen()
        with pytest.raises(RendezvousError, match="pub_port"):
            connect(**arguments)


def test_departed_rank_over_tcp_is_named_with_its_failure(as_ranks: AsRanks) -> None:
    def work(communicators: Communicators) -> Any:
        channel = communicators.channel("user")
        channel.allgather(0)
        if communicators.all_ranks.rank == 1:
            communicators.close(failure=RuntimeError("no memory"))
            return None
        return channel.allgather(1)

    for rank, outcome in enumerate(as_ranks(3, work, force_tcp=True, secret="s")):
        if rank != 1:
            assert isinstance(outcome, PeerLost) and "rank 1 (" in str(outcome) and "no memory" in str(outcome)
