"""Requests to a master: sent again, given up, refused, interrupted, and over TLS."""

from __future__ import annotations

import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from det_core.backend._retry import MOST, Backoff
from det_core.backend.rest import Credential, MasterSession, about, credentials
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, UnknownToMaster
from support.answers import Answers, Say, answering
from support.processes import free_port
from support.proxy import LOST, RESET, TRUNCATED, proxy_before

OK = Say(200, {"version": "0.37.0", "clusterId": "c"})


@contextmanager
def session_to(url: str, *shown: Credential, patience: float = 300.0, **how: str) -> Iterator[MasterSession]:
    session = MasterSession(url, shown, patience=patience, **how)  # type: ignore[arg-type]
    try:
        yield session
    finally:
        session.close()


def test_a_master_that_is_busy_is_asked_again_when_it_says() -> None:
    with answering(Say(503, headers={"Retry-After": "1"}), Say(429), Say(502), OK) as server:
        with session_to(server.url) as session:
            began = time.monotonic()
            assert about(session).version == "0.37.0"
            assert time.monotonic() - began >= 1.0
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (400, MasterError, "no good"),
        (401, MasterDenied, "the token is not valid any more"),
        (403, MasterDenied, "this token may not do that"),
        (404, UnknownToMaster, "no good"),
        (409, MasterError, "no good"),
        (500, MasterError, "no good"),
        (501, MasterError, "no good"),
    ],
)
def test_a_refusal_names_master_route_and_reason(status: int, kind: type[MasterError], said: str) -> None:
    with answering(Say(status, {"error": {"code": 2, "reason": "x", "error": "no good"}})) as server:
        with session_to(server.url) as session, pytest.raises(kind) as e:
            session.call("POST", "/api/v1/x", {"a": 1})
    assert type(e.value) is kind and e.value.status == status
    assert str(e.value).startswith(f"POST {server.url}/api/v1/x: {status} no good") and said in str(e.value)
    assert len(server.asked) == 1


def test_an_answer_that_is_no_masters() -> None:
    with answering(Say(200, b"<html>"), Say(301, headers={"Location": "http://else"}), Say(404, b"gone")) as server:
        with session_to(server.url) as session:
            with pytest.raises(MasterError, match=r"what answers there is no master; it is no JSON: b'<html>'"):
                session.call("GET", "/")
            with pytest.raises(MasterError, match="it sends elsewhere, to http://else"):
                session.call("GET", "/")
            with pytest.raises(UnknownToMaster, match="404 gone"):
                session.call("GET", "/")


def test_the_allocations_token_goes_first_and_the_users_where_it_is_unknown() -> None:
    shown = credentials("session", "user")
    with answering(Say(401), OK, OK, Say(401)) as server, session_to(server.url, *shown) as session:
        about(session)
        about(session)
    heads = [asked[2] for asked in server.asked]
    with answering(OK, Say(401)) as ended, session_to(ended.url, *shown) as session:
        session.call("GET", "/x")
        with pytest.raises(MasterDenied):
            session.call("GET", "/x")
    assert len(ended.asked) == 2, "the token of an allocation that has ended is not replaced by the user's"
    assert heads[0]["Grpc-Metadata-x-allocation-token"] == "Bearer session" and "Authorization" not in heads[0]
    assert [h.get("Authorization") for h in heads[1:]] == ["Bearer user"] * 2
    assert credentials(None, "user") == [Credential("Authorization", "user")] and credentials(None, None) == []


def test_netrc_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with answering(OK) as server, session_to(server.url, Credential("Authorization", "user")) as session:
        about(session)
    assert server.asked[0][2]["Authorization"] == "Bearer user"


def test_patience_ends() -> None:
    with session_to(f"http://127.0.0.1:{free_port()}", patience=0.5) as session:
        began = time.monotonic()
        with pytest.raises(MasterUnreachable, match=r"no answer \(.*refused.*; tried for"):
            about(session)
        assert time.monotonic() - began < 100
        with pytest.raises(ConnectionError, match="tried once"):
            session.call("GET", "/", patience=0)


def test_a_refusal_of_what_was_done_before_is_none() -> None:
    with answering(OK, Say(500, {"error": {"error": "a repeat"}})) as server, proxy_before(server.url) as proxy:
        proxy.begin(lambda number, request: LOST if number == 1 else None)
        with session_to(proxy.url) as session:
            assert session.call("POST", "/x", {}, settled=lambda: True) == {}
            with pytest.raises(MasterError, match="a repeat"):
                session.call("POST", "/x", {}, settled=lambda: True)  # its first answer: it was never in doubt


def test_what_counts_twice_is_looked_for_before_it_is_sent_again() -> None:
    with answering(OK) as server, proxy_before(server.url) as proxy, session_to(proxy.url) as session:
        proxy.begin(lambda number, request: LOST if number == 1 else None)
        assert session.call("POST", "/x", {}, settled=lambda: True, careful=True) == {}
        assert len(server.asked) == 1
        proxy.begin(lambda number, request: RESET if number == 1 else TRUNCATED if number == 2 else None)
        session.call("POST", "/x", {}, settled=lambda: False, careful=True)
        assert len(server.asked) == 3


def test_an_interrupt_ends_a_request_that_waits() -> None:
    gate = threading.Event()
    with answering(OK) as server, session_to(server.url) as session:
        server.answers = _Held(gate)  # type: ignore[assignment]
        problems: list[Exception] = []

        def ask() -> None:
            try:
                session.call("GET", "/wait")
            except MasterUnreachable as e:
                problems.append(e)

        thread = threading.Thread(target=ask)
        thread.start()
        while not server.asked:
            time.sleep(0.01)
        began = time.monotonic()
        session.interrupt()
        thread.join()
        assert not thread.is_alive() and time.monotonic() - began < 100 and len(problems) == 1
        with pytest.raises(MasterUnreachable):
            session.call("GET", "/more")
        gate.set()


class _Held(list[Say]):
    """Answers that come when the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__([OK])
        self._gate = gate

    def __getitem__(self, at: object) -> Say:
        self._gate.wait()
        return OK


def test_pauses_grow_differ_and_heed_the_server() -> None:
    least, most = Backoff(lambda: 0.0), Backoff(lambda: 1.0)
    low, high = [least.next() for _ in range(12)], [most.next() for _ in range(12)]
    assert low == sorted(low) and low[0] == 0.05 and high[0] == 0.1 and low[-1] == MOST / 2 and high[-1] == MOST
    assert Backoff(lambda: 0.0).next("7") == 7 and Backoff(lambda: 0.0).next("soon") == 0.05
    assert Backoff(lambda: 0.0).next("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert Backoff(lambda: 0.0).next("99999999") == 300


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


def test_tls_by_the_variables_of_the_contract(secure: Answers, certificate: Path) -> None:
    pem = str(certificate.with_suffix(".crt"))
    with session_to(secure.url, cert_file=pem, cert_name="master.example") as session:
        assert about(session).cluster_id == "c"
    with session_to(secure.url, cert_file="noverify") as session:
        assert about(session).cluster_id == "c"
    for how in ({}, {"cert_file": pem}, {"cert_name": "master.example"}):
        with session_to(secure.url, **how) as session:
            began = time.monotonic()
            with pytest.raises(MasterError, match=r"is not trusted .*: set DET_MASTER_CERT_FILE"):
                about(session)
            assert time.monotonic() - began < 100, "was tried again"
    with session_to(secure.url, cert_file=__file__) as session:
        with pytest.raises(MasterError, match=r"DET_MASTER_CERT_FILE=.* holds no certificates"):
            about(session)
