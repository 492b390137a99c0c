"""One unix link: what the socket does not take is queued, in order and copied; nothing is cut in the middle."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from det_core.ipc._frames import BadFrame, Frame, Kind, Op, encode
from det_core.ipc._link import Interrupted, UnixLink
from det_core.ipc._payload import IN_FILE_FROM, MAX_FILES, Mapper, Packet


class Pair:
    """A link, and the link at its other end."""

    def __init__(self) -> None:
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.armed = False
        self.near = UnixLink(one, arm=lambda _: self.arm(True), disarm=lambda _: self.arm(False))
        self.far = UnixLink(two, arm=lambda _: None, disarm=lambda _: None)

    def arm(self, armed: bool) -> None:
        self.armed = armed

    def take(self, count: int) -> list[Frame]:
        """Receive ``count`` frames at the far end, sending on at the near one."""
        frames: list[Frame] = []
        deadline = time.monotonic() + 30
        while len(frames) < count:
            assert time.monotonic() < deadline, f"{len(frames)} of {count} frames"
            if self.armed:
                self.near.flush()
            frames += self.far.receive()
        return frames


@pytest.fixture
def pair() -> Iterator[Pair]:
    links = Pair()
    yield links
    links.near.close()
    links.far.close()


def packet(number: int, *segments: bytes) -> Packet:
    return Packet(Kind.CALL, Op.gather, "user", 1, number, segments)


def test_frames_that_do_not_fit_are_queued_in_order(pair: Pair) -> None:
    queued = sum(pair.near.send(packet(n, bytes([n % 256]) * 50_000)) for n in range(100))
    assert queued > 0 and pair.armed and pair.near.queued == queued
    frames = pair.take(100)
    assert [f.number for f in frames] == list(range(100))
    assert all(bytes(f.segments[0]) == bytes([n % 256]) * 50_000 for n, f in enumerate(frames))
    assert not pair.armed and pair.near.queued == 0


def test_small_frames_and_large_ones_keep_their_order(pair: Pair) -> None:
    for n in range(200):
        pair.near.send(encode(Kind.POST, number=n, body=b"x" * 2000) if n % 3 else packet(n, bytes(IN_FILE_FROM), b"y"))
    frames = pair.take(200)
    assert [f.number for f in frames] == list(range(200))
    assert {f.owed for f in frames} == {0, IN_FILE_FROM}


def test_what_is_queued_is_a_copy(pair: Pair) -> None:
    data = bytearray(b"a" * 900_000)
    pair.near.send(packet(1, memoryview(data)))  # type: ignore[arg-type]
    data[:] = b"b" * len(data)
    (frame,) = pair.take(1)
    received = bytes(frame.segments[0])
    assert set(received) == {ord("a")}


def test_more_runs_than_the_kernel_takes_at_once(pair: Pair) -> None:
    segments = [bytes([n % 256]) * 100 for n in range(3000)]
    pair.near.send(packet(1, *segments))
    (frame,) = pair.take(1)
    assert [bytes(s) for s in frame.segments] == segments


def test_more_large_segments_than_files_can_be_passed(pair: Pair) -> None:
    segments = [bytes([n % 256]) * IN_FILE_FROM for n in range(MAX_FILES + 3)]
    pair.near.send(packet(1, *segments))
    (frame,) = pair.take(1)
    assert frame.owed == MAX_FILES * IN_FILE_FROM
    mapper = Mapper(limit=1000)
    assert all(bytes(mapper.open([s])[0][:5]) == bytes([n % 256]) * 5 for n, s in enumerate(frame.segments))


def test_received_files_are_not_passed_on_to_programs_that_are_started(pair: Pair) -> None:
    pair.near.send(packet(1, bytes(IN_FILE_FROM)))
    (frame,) = pair.take(1)
    assert not os.get_inheritable(frame.segments[0].fd)


def test_the_end_is_seen_after_what_was_sent_before(pair: Pair) -> None:
    pair.near.send(encode(Kind.POST, body=b"last words"))
    pair.near.close()
    (frame,) = pair.far.receive()
    assert bytes(frame.segments[0]) == b"last words" and not pair.far.eof
    assert pair.far.receive() == [] and pair.far.eof


def test_sending_to_a_peer_that_is_gone_is_no_error(pair: Pair) -> None:
    pair.far.close()
    assert pair.near.send(encode(Kind.POST, body=b"x")) == 0
    assert pair.near.send(encode(Kind.POST, body=b"x")) == 0


def test_what_is_queued_for_a_peer_that_goes_is_forgotten(pair: Pair) -> None:
    for n in range(100):
        pair.near.send(packet(n, bytes(50_000)))
    assert pair.near.queued and pair.armed
    queued = pair.near.queued
    pair.far.close()
    assert pair.near.flush() == queued
    assert pair.near.queued == 0 and not pair.armed


def test_a_killed_link_forgets_its_queue(pair: Pair) -> None:
    for n in range(100):
        pair.near.send(packet(n, bytes(50_000)))
    pair.near.kill()
    assert pair.near.queued == 0 and not pair.armed
    assert pair.near.send(encode(Kind.POST, body=b"x")) == 0


def test_after_an_exception_in_the_middle_of_a_message_nothing_more_is_sent(pair: Pair) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    pair.near._write = interrupt  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        pair.near.send(encode(Kind.POST, body=b"x"))
    with pytest.raises(Interrupted):
        pair.near.send(encode(Kind.POST, body=b"x"))


def test_garbage_is_no_frame(pair: Pair) -> None:
    pair.near.sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 10)
    with pytest.raises(BadFrame):
        pair.far.receive()
