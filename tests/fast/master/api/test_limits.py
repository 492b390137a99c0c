"""Limits on connections, with real sockets whose other ends stay open."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core.master.api import Limits
from det_core.master.api._limits import MAX_HEADER_BYTES, MAX_PIPELINED
from support.hostile import Peer
from support.processes import until
from support.running_master import TOKEN, Running

LIMITS = Limits(header_timeout=2.0, body_timeout=3.0, reader_timeout=3.0, max_unknown=4)
MASTER = b"GET /api/v1/master HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_LOGIN = b"POST /api/v1/auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
LONG_LOG_BYTES = 18_000_000
AUTHORIZED = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
ME = b"GET /api/v1/me HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Running]:
    """Yield a master with short deadlines."""
    running = Running(tmp_path, limit=1 << 20, limits=LIMITS)
    yield running
    running.close()


def connections(master: Running) -> int:
    """Return the number of open connections."""
    return len(master.server.server_state.connections)


def test_half_a_request_ends_at_its_deadline(limited: Running) -> None:
    began = time.monotonic()
    with Peer(limited.url) as silent, Peer(limited.url, MASTER[:-2]) as headers, Peer(limited.url, HALF_LOGIN) as body:
        assert silent.rest() == headers.rest() == b""
        assert time.monotonic() - began >= LIMITS.header_timeout
        body.rest()
        assert time.monotonic() - began >= LIMITS.body_timeout
        assert connections(limited) == 0


def test_slow_headers_do_not_move_their_deadline(limited: Running) -> None:
    with Peer(limited.url, b"GET /") as peer, pytest.raises(OSError, match=r"(?i)broken pipe|reset"):
        while True:
            peer.socket.sendall(b"x")
            time.sleep(0.1)


def test_headers_without_end_close_the_connection(limited: Running) -> None:
    with Peer(limited.url, b"GET / HTTP/1.1\r\n") as peer, pytest.raises(OSError, match=r"(?i)broken pipe|reset"):
        for _ in range(MAX_HEADER_BYTES):
            peer.socket.sendall(b"x: " + b"y" * 1000 + b"\r\n")


def test_requests_far_ahead_of_an_answer_are_400(limited: Running) -> None:
    with Peer(limited.url, MASTER * (2 * MAX_PIPELINED)) as peer:
        assert b"400 Bad Request" in peer.rest()


def test_idle_connection_ends_without_a_token_and_stays_with_one(limited: Running) -> None:
    with Peer(limited.url, ME) as known, Peer(limited.url, MASTER) as unknown:
        assert b"200 OK" in known.answer()
        assert b"200 OK" in unknown.rest(), "closed when no second request comes"
        time.sleep(LIMITS.header_timeout)
        known.socket.sendall(ME)
        assert b"200 OK" in known.answer()
        known.socket.sendall(ME[:30])
        assert known.rest() == b"", "half of a later request has a deadline, too"


def test_connections_without_token_beyond_the_limit_wait_for_their_turn(limited: Running) -> None:
    with Peer(limited.url, ME) as known:
        known.answer()
        hostile = [Peer(limited.url, HALF_LOGIN) for _ in range(LIMITS.max_unknown)]
        until(lambda: connections(limited) == 1 + LIMITS.max_unknown)
        with Peer(limited.url, ME) as late:
            late.socket.settimeout(1.0)
            with pytest.raises(TimeoutError):
                late.answer()
            known.socket.sendall(ME)
            assert b"200 OK" in known.answer(), "who has shown a token is served"
            late.socket.settimeout(None)
            assert b"200 OK" in late.answer()
        for peer in hostile:
            with peer:
                peer.rest()


def long_log(master: Running) -> str:
    """Return the path of a log that does not fit into the buffers between two sockets."""
    spec = master.a_trial()
    line = {"task_id": spec.task_id, "log": "x" * (LONG_LOG_BYTES // 2_000)}
    for _ in range(20):
        assert master.ask("POST", "task/logs", {"logs": [line] * 100}, spec.session_token).status == 200
    return f"/api/v1/trials/{spec.trial_id}/logs"


def test_reader_that_takes_nothing_is_closed_unless_it_follows(tmp_path: Path) -> None:
    master = Running(tmp_path, limit=1 << 20, limits=LIMITS)
    try:
        path = long_log(master)
        ask = f"GET {path}{{}} HTTP/1.1\r\n".encode() + AUTHORIZED + b"\r\n"
        with Peer(master.url, ask.replace(b"{}", b"?follow=true")) as follower:
            until(lambda: connections(master) == 1)
            with Peer(master.url, ask.replace(b"{}", b"")) as reader:
                until(lambda: connections(master) == 2)
                until(lambda: connections(master) == 1)
                taken = reader.rest()
            assert not taken.endswith(b"0\r\n\r\n"), "the log was cut off"
            came = 0
            while came < LONG_LOG_BYTES:
                part = follower.socket.recv(1 << 16)
                assert part, "the log that is followed was cut off"
                came += len(part)
    finally:
        master.close()


def test_bodies_beyond_the_bound_of_all_together_are_503(master: Running) -> None:
    in_flight = master.app.state.bodies_in_flight
    body = json.dumps({"logs": [{"task_id": "x", "log": "x" * 600_000}]}).encode()
    head = b"POST /api/v1/task/logs HTTP/1.1\r\n" + AUTHORIZED + b"Content-Length: %d\r\n\r\n" % len(body)
    with pytest.MonkeyPatch.context() as patch, Peer(master.url, head + body[:-1]) as half:
        patch.setattr(in_flight, "max_bytes", 1_000_000)
        until(lambda: in_flight.bytes == len(body) - 1)
        refused = master.ask("POST", "task/logs", body)
        assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (503, 14, "1")
        half.socket.sendall(body[-1:])
        assert b"HTTP/1.1 200" in half.answer()
    until(lambda: in_flight.bytes == 0)


@pytest.mark.parametrize(
    "host", ["localhost:1", "127.0.0.1", "[::1]:80", "10.1.2.3:8", socket.gethostname(), "a.localhost"]
)
def test_own_names_are_no_foreign_host(master: Running, host: str) -> None:
    assert master.ask("GET", "me", token=None, headers={"Host": host}).status == 401


def test_foreign_host_gets_only_what_is_public_without_token(master: Running) -> None:
    foreign = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert master.ask("GET", "master", token=None, headers=foreign).status == 200
    for more in ({}, {"cookies": {"auth": master.token}}, {"headers": foreign | {"Authorization": "Bearer x"}}):
        refused = master.ask("GET", "experiments", token=None, **{"headers": foreign, **more})
        assert (refused.status, refused.error["code"]) == (421, 7), more
    assert "--allow-host" in refused.error["error"]
    assert master.ask("GET", "experiments", headers=foreign).status == 200, "a proxy's name, and a header's token"
