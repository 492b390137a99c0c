"""Requests to a master: retried, given up, rejected, streamed, interrupted, and over TLS and proxies."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import ContextClosed, MasterDenied, MasterError, MasterUnreachable, UnknownToMaster
from det_core.protocol import MasterSession
from det_core.protocol.transport import MAX_DELAY, retry_delay
from support.answers import Answers, Say, answering
from support.processes import free_port, until
from support.proxy import BUSY, LOST, RESET, SILENT, TRUNCATED, proxy_before

ABOUT = "/api/v1/master"
OK = Say(200, {"version": "0.37.0"})
VERSION = {"version": "0.37.0"}
SHORT = 0.2
"""Time after which a request without an answer has failed, in seconds."""


@contextmanager
def session_to(url: str, timeout: float = 300.0, **how: str) -> Iterator[MasterSession]:
    session = MasterSession(url, timeout=timeout, **how)  # type: ignore[arg-type]
    try:
        yield session
    finally:
        session.close()


def test_busy_master_is_asked_again_after_its_delay() -> None:
    with answering(Say(503, headers={"Retry-After": "1"}), Say(429), Say(502), OK) as server:
        with session_to(server.url) as session:
            began = time.monotonic()
            assert session.call("GET", ABOUT, params={"a": 1, "b": None, "c": [2, 3]}) == VERSION
            assert time.monotonic() - began >= 1.0
    assert [path for _, path, _ in server.asked] == [f"{ABOUT}?a=1&c=2&c=3"] * 4


@pytest.mark.parametrize(
    ("status", "kind", "hint"),
    [
        (400, MasterError, ""),
        (401, MasterDenied, ": the token is no longer valid, or is another master's"),
        (403, MasterDenied, ": this token may not do that"),
        (404, UnknownToMaster, ""),
        (500, MasterError, ""),
        (501, MasterError, ""),
    ],
)
def test_rejection_names_request_and_reason(status: int, kind: type[MasterError], hint: str) -> None:
    with answering(Say(status, {"error": {"code": 2, "reason": "x", "error": "no good"}})) as server:
        with session_to(server.url) as session, pytest.raises(kind) as e:
            session.call("POST", "/api/v1/x", {"a": 1})
    assert type(e.value) is kind
    assert str(e.value) == f"POST {server.url}/api/v1/x: {status} no good{hint}"
    assert (e.value.status, e.value.detail, e.value.maybe_applied) == (status, "no good", False)
    assert len(server.asked) == 1


def test_answer_of_another_server_is_rejected() -> None:
    moved = Say(301, headers={"Location": "http://else"})
    with answering(Say(200, b"<html>"), moved, Say(404, b"gone"), Say(200, b" ")) as server:
        with session_to(server.url) as session:
            with pytest.raises(MasterError, match="not a master: answer is not JSON: b'<html>'"):
                session.call("GET", "/")
            with pytest.raises(MasterError, match="redirects to http://else; use the master's own address"):
                session.call("GET", "/")
            with pytest.raises(UnknownToMaster, match="404 gone"):
                session.call("GET", "/")
            assert session.call("GET", "/") == {}


def test_server_error_is_retried_on_request() -> None:
    with answering(Say(500), OK) as server, session_to(server.url) as session:
        assert session.call("POST", "/x", b"{}", retry_server_errors=True) == VERSION
        assert len(server.asked) == 2


def test_user_token_replaces_an_unknown_session_token_only() -> None:
    shown = {"session_token": "session", "user_token": "user"}
    with answering(Say(401), OK, OK, Say(401)) as server, session_to(server.url, **shown) as session:
        session.call("GET", ABOUT)
        session.call("GET", ABOUT)
    headers = [headers for *_, headers in server.asked]
    assert headers[0]["Grpc-Metadata-x-allocation-token"] == "Bearer session" and "Authorization" not in headers[0]
    assert [each.get("Authorization") for each in headers[1:]] == ["Bearer user"] * 2
    with answering(OK, Say(401)) as server, session_to(server.url, **shown) as session:
        session.call("GET", "/x")
        with pytest.raises(MasterDenied):
            session.call("GET", "/x")
    assert len(server.asked) == 2, "the token of an ended allocation was replaced by the user's"


def test_threads_rejected_at_once_all_use_the_next_credential() -> None:
    count = 4
    barrier = threading.Barrier(count)

    def answer(headers: dict[str, str]) -> Say:
        if "Authorization" in headers:
            return OK
        barrier.wait()
        return Say(401)

    answers: list[Any] = []
    with answering(answer) as server, session_to(server.url, session_token="session", user_token="user") as session:
        run_threads(count, lambda: answers.append(session.call("GET", "/x")))
    assert answers == [VERSION] * count


def run_threads(count: int, work: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_netrc_and_proxies_do_not_apply_to_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with answering(OK) as server, session_to(server.url, user_token="user") as session:
        session.call("GET", ABOUT)
    assert server.asked[0][2]["Authorization"] == "Bearer user"


def test_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(OK) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        with session_to("http://master.invalid:80", user_token="user") as session:
            assert session.call("GET", ABOUT) == VERSION
    assert proxy.asked[0][1] == f"http://master.invalid:80{ABOUT}"


def test_timeout_ends_the_attempts() -> None:
    with session_to(f"http://127.0.0.1:{free_port()}", timeout=SHORT) as session:
        with pytest.raises(MasterUnreachable, match=r"no answer \(.*refused.*; tried for") as e:
            session.call("GET", ABOUT)
        assert not e.value.maybe_applied and "refused" in e.value.detail
        with pytest.raises(ConnectionError, match="tried once"):
            session.call("GET", "/", timeout=0)


def test_idle_timeout_ends_an_attempt() -> None:
    with answering(OK) as server, proxy_before(server.url) as proxy, session_to(proxy.url) as session:
        proxy.begin(lambda number, request: SILENT if number == 1 else None)
        assert session.call("GET", ABOUT, idle_timeout=SHORT) == VERSION
        assert len(proxy.requests) == 2


def test_rejected_repeat_may_have_been_applied() -> None:
    with answering(OK, Say(500, {"error": {"error": "a repeat"}})) as server, proxy_before(server.url) as proxy:
        proxy.begin(lambda number, request: LOST if number == 1 else None)
        with session_to(proxy.url) as session:
            for maybe_applied in (True, False):
                with pytest.raises(MasterError, match="a repeat") as e:
                    session.call("POST", "/x", {})
                assert (e.value.status, e.value.maybe_applied) == (500, maybe_applied)


@pytest.mark.parametrize("fault", [LOST, RESET, TRUNCATED, BUSY])
def test_request_sent_once_is_not_repeated_if_it_may_have_arrived(fault: str) -> None:
    with answering(OK) as server, proxy_before(server.url) as proxy, session_to(proxy.url) as session:
        proxy.begin(lambda number, request: fault if number == 1 else None)
        if fault == BUSY:  # the master did nothing
            assert session.call("POST", "/x", {}, once=True) == VERSION
            return
        with pytest.raises(MasterUnreachable, match="the master may have received the request") as e:
            session.call("POST", "/x", {}, once=True)
        assert e.value.maybe_applied and len(proxy.requests) == 1
        assert session.call("POST", "/x", {}) == VERSION


def test_stream_yields_each_result_as_it_arrives() -> None:
    sent: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(10_000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            sent.append(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        with session_to(f"http://127.0.0.1:{listener.getsockname()[1]}") as session:
            with session.stream("/logs", {"follow": True}) as results:
                thread.join()
                for text in ('{"result": {"n": 1}}\n', '\n{"result": {"n"', ": 2}}\n", '{"error": {"error": "x"}}\n'):
                    sent[0].sendall(f"{len(text):x}\r\n{text}\r\n".encode())
                    if text == '{"result": {"n": 1}}\n':
                        assert next(results) == {"n": 1}
                assert next(results) == {"n": 2}
                with pytest.raises(MasterError, match=r"GET .*/logs: x$"):
                    next(results)
        sent[0].close()


def test_stream_that_ends_early_or_is_rejected_raises() -> None:
    body = b"\n".join(json.dumps({"result": n}).encode() for n in range(50))
    with answering(Say(200, body)) as server, proxy_before(server.url) as proxy, session_to(proxy.url) as session:
        proxy.begin(lambda number, request: TRUNCATED)
        with session.stream("/x") as results, pytest.raises(MasterUnreachable, match="no answer"):
            list(results)
        proxy.begin()
        with session.stream("/x") as results:
            assert next(results) == 0
            with session.stream("/y") as others:  # on another connection
                assert next(others) == 0
            assert list(results) == list(range(1, 50))
    with answering(Say(404)) as server, session_to(server.url) as session:
        with pytest.raises(UnknownToMaster), session.stream("/x"):
            pass


def test_interrupt_ends_a_request_under_way() -> None:
    gate = threading.Event()

    def answer(headers: dict[str, str]) -> Say:
        gate.wait()
        return OK

    problems: list[Exception] = []

    def ask() -> None:
        try:
            session.call("GET", "/wait")
        except MasterUnreachable as e:
            problems.append(e)

    with answering(answer) as server, session_to(server.url) as session:
        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: server.asked)
        session.interrupt()
        thread.join()
        assert len(problems) == 1 and session.is_closed
        with pytest.raises(MasterUnreachable):
            session.call("GET", "/more")
        gate.set()


def test_session_of_a_forked_process_raises() -> None:
    with session_to("http://127.0.0.1:1") as session:
        pid = os.fork()
        if pid == 0:
            try:
                session.call("GET", ABOUT)
            except ContextClosed:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_retry_delays_grow_differ_and_heed_the_server() -> None:
    low = [retry_delay(attempts, random=lambda: 0.0) for attempts in range(12)]
    high = [retry_delay(attempts, random=lambda: 1.0) for attempts in range(12)]
    assert low == sorted(low) and low[0] == 0.05 and high[0] == 0.1
    assert low[-1] == MAX_DELAY / 2 and high[-1] == MAX_DELAY
    heeded = [retry_delay(0, text, lambda: 0.0) for text in ("7", " 0 ", "soon", "-1", "99999999")]
    assert heeded == [7, 0, 0.05, 0.05, 300]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a self-signed certificate for master.example, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "master.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", "/CN=master.example", "-addext", "subjectAltName=DNS:master.example",
            "-keyout", path, "-out", path.with_suffix(".crt"),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


@pytest.fixture
def secure(certificate: Path) -> Iterator[Answers]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.with_suffix(".crt"), certificate)
    with answering(OK, context=context) as server:
        yield server


def test_certificate_is_checked_by_file_and_name(secure: Answers, certificate: Path) -> None:
    pem = str(certificate.with_suffix(".crt"))
    for tls in ({"cert_file": pem, "cert_name": "master.example"}, {"cert_file": "noverify"}):
        with session_to(secure.url, **tls) as session:
            assert session.call("GET", ABOUT) == VERSION
    for tls in ({}, {"cert_file": pem}, {"cert_name": "master.example"}):
        with session_to(secure.url, timeout=float("inf"), **tls) as session:
            with pytest.raises(MasterError, match=r"is not trusted .*: set DET_MASTER_CERT_FILE"):
                session.call("GET", ABOUT)
    with pytest.raises(MasterError, match=r"DET_MASTER_CERT_FILE=.* has no certificates"):
        MasterSession(secure.url, cert_file=__file__)
