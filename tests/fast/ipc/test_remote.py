"""Links between machines: CURVE, heartbeats, loss; and the same collectives over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from det_core.errors import CollectiveMismatch, PeerLost, RendezvousError
from det_core.ipc import Links, _liveness, connect
from det_core.ipc._frames import UNTRUSTED_LIMIT, BadFrame, Kind, Op, encode, encode_head
from det_core.ipc._payload import Mapper, Packet, dump
from det_core.ipc._remote import CHUNK, decode
from det_core.ipc._secrets import CurveKeys, hkdf
from support.processes import until

AsRanks = Callable[..., Any]
PlaceOf = Callable[..., dict[str, Any]]
TCP: list[dict[str, Any]] = [
    {"force_tcp": True, "secret": "s"},
    {"force_tcp": True, "insecure": True},
    {"machines": 2, "secret": "s"},
    {"machines": 2, "secret": "s", "force_tcp": True},
]


def test_hkdf_gives_the_vectors_of_rfc_5869() -> None:
    key = hkdf(b"\x0b" * 22, bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"), 42, bytes.fromhex("000102030405060708090a0b0c"))
    assert key.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_keys_depend_on_the_secret_and_the_role() -> None:
    one, same, other = CurveKeys.derive("a"), CurveKeys.derive("a"), CurveKeys.derive("b")
    assert one == same
    assert len({one.chief_secret, one.worker_secret, other.chief_secret, other.worker_secret}) == 4
    assert len(one.worker_raw) == 32


def test_a_large_message_is_cut_into_parts_and_put_together() -> None:
    array = np.arange(300_000)
    parts = Packet(Kind.CALL, Op.gather, "user", 3, 4, dump({"a": array})).remote(CHUNK)
    assert len(parts) > 4 and max(map(len, parts)) <= CHUNK
    frame = decode(parts, None)
    assert (frame.kind, frame.op, frame.rank, frame.number) == (Kind.CALL, Op.gather, 3, 4)
    assert np.array_equal(Mapper().load(frame.segments)["a"], array)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"x" * 100],
        [encode_head(Kind.CALL, lengths=[10])],
        [encode_head(Kind.CALL, lengths=[10]), b"12345678901"],
        [encode_head(Kind.CALL, lengths=[1 << 63 | 5])],
        [encode_head(Kind.HELLO, lengths=[UNTRUSTED_LIMIT + 1]), b"x" * (UNTRUSTED_LIMIT + 1)],
        [encode(Kind.HELLO, body=b"x")[:-3]],
    ],
)
def test_a_malformed_message_is_no_frame(parts: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        decode(parts, UNTRUSTED_LIMIT)


def test_a_hello_that_comes_twice_is_none_the_second_time(as_ranks: AsRanks) -> None:
    """As where the first was for a chief that was just ending, and the connection to the next one takes it along."""

    def work(links: Links) -> Any:
        star = links.everyone
        if star.rank:
            star.peers[0].tell(encode(Kind.HELLO, rank=star.rank, body=b"whatever"))
        return [links.lane("user").allgather(star.rank) for _ in range(3)]

    assert as_ranks(2, work, force_tcp=True, insecure=True).values() == [[[0, 1]] * 3] * 2


@pytest.mark.parametrize("arguments", TCP)
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_over_tcp(as_ranks: AsRanks, size: int, arguments: dict[str, Any]) -> None:
    def work(links: Links) -> Any:
        lane, rank = links.lane("user"), links.everyone.rank
        out = []
        for turn in range(3):
            out.append((lane.gather((rank, turn)), lane.allgather(rank), lane.broadcast((rank, turn))))
        array = lane.broadcast(np.arange(500_000.0) if rank == 0 else None)
        array[0] += rank
        return out, array.sum() - rank, links.local_lane("user").allgather(rank)

    for rank, (out, total, _) in enumerate(as_ranks(size, work, **arguments).values()):
        assert total == np.arange(500_000.0).sum()
        for turn, (gathered, everybody, told) in enumerate(out):
            assert gathered == ([(r, turn) for r in range(size)] if rank == 0 else None)
            assert everybody == list(range(size)) and told == (0, turn)


@pytest.mark.parametrize("arguments", TCP)
def test_disagreement_over_tcp(as_ranks: AsRanks, arguments: dict[str, Any]) -> None:
    def work(links: Links) -> Any:
        lane = links.lane("user")
        return lane.broadcast(1) if links.everyone.rank == 3 else lane.allgather(0)

    for outcome in as_ranks(4, work, **arguments):
        assert isinstance(outcome, CollectiveMismatch) and "rank 3 called broadcast (call 1)" in str(outcome)


def test_without_a_secret_machines_do_not_talk_and_the_message_says_what_to_type(place: PlaceOf) -> None:
    with pytest.raises(RendezvousError, match="export DET_CORE_SECRET=") as caught:
        connect(**place(0, 4, machines=2))
    assert "openssl rand" in str(caught.value) and "insecure=True" in str(caught.value)
    with pytest.raises(RendezvousError, match="export DET_CORE_SECRET="):
        connect(**place(1, 2, force_tcp=True))


def test_a_worker_with_another_secret_is_refused(place: PlaceOf) -> None:
    outcomes: list[Any] = [None, None, None]

    def run(index: int, rank: int, secret: str) -> None:
        try:
            outcomes[index] = connect(**place(rank, 2, force_tcp=True, secret=secret))
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


def test_refusals_reach_a_worker_over_tcp(
    place: PlaceOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_liveness, "WARN_AFTER", tuple(n / 20 for n in range(1, 10_000)))
    arguments = {"force_tcp": True, "secret": "s"}
    out: dict[str, Any] = {}

    def run(name: str, place: dict[str, Any]) -> threading.Thread:
        def work() -> None:
            try:
                out[name] = connect(**place)
            except RendezvousError as e:
                out[name] = e

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    chief = run("chief", place(0, 3, **arguments))
    first = run("first", place(1, 3, **arguments))
    until(lambda: "waiting for rank 2" in caplog.text)
    for name, refused in (("twice", place(1, 3, **arguments)), ("larger", place(2, 4, **arguments))):
        run(name, refused).join()
    run("job", place(2, 3, job=("another",), **arguments)).join()
    assert "rank 1 is already there" in str(out["twice"])
    assert "size=4" in str(out["larger"])
    assert "another job" in str(out["job"])
    last = run("last", place(2, 3, **arguments))
    for thread in (chief, first, last):
        thread.join()
    closing = [threading.Thread(target=out[n].close) for n in ("chief", "first", "last")]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def test_a_port_that_is_taken(place: PlaceOf) -> None:
    import socket

    arguments = place(0, 2, force_tcp=True, secret="s")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", arguments["port"]))
        taken.listen()
        with pytest.raises(RendezvousError, match="pub_port"):
            connect(**arguments)


def test_a_rank_that_closes_over_tcp_is_named_with_its_failure(as_ranks: AsRanks) -> None:
    def work(links: Links) -> Any:
        lane = links.lane("user")
        lane.allgather(0)
        if links.everyone.rank == 1:
            links.close(failure=RuntimeError("no memory"))
            return None
        return lane.allgather(1)

    for rank, outcome in enumerate(as_ranks(3, work, force_tcp=True, secret="s")):
        if rank != 1:
            assert isinstance(outcome, PeerLost) and "rank 1 (" in str(outcome) and "no memory" in str(outcome)
