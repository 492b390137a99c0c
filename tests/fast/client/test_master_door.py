"""The client's door to a master: what is sent, what is sent again, and what each refusal becomes."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import orjson
import pytest

from det_core._json import str_to_nonfinite
from det_core.client import Master
from det_core.client._address import Address, canonical, locate, reach
from det_core.client._answers import plain, seconds
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, UnknownToMaster
from support.answers import Say, answering


def test_answers_are_read_and_connections_kept() -> None:
    with answering(Say(200, {"a": 1}), Say(200, {"a": 2})) as server, Master(Address(server.url, "secret")) as master:
        assert master.get("things/1", wait=0.0, limit=3, skipped=None, yes=True) == {"a": 1}
        assert master.post("things", {"b": [1]}) == {"a": 2}
        assert [asked[:2] for asked in server.asked] == [
            ("GET", "/api/v1/things/1?limit=3&yes=true"),
            ("POST", "/api/v1/things"),
        ]
        assert all(headers["Authorization"] == "Bearer secret" for *_, headers in server.asked)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            404,
            {"error": {"code": 5, "error": "experiment 7 is not known"}},
            UnknownToMaster,
            "experiment 7 is not known",
        ),
        (403, {"error": {"code": 7, "error": "not yours"}}, MasterDenied, "not yours"),
        (401, {"error": {"code": 16, "error": "token missing"}}, MasterDenied, "DET_USER_TOKEN"),
        (500, {"message": "broken"}, MasterError, "broken"),
        (418, {}, MasterError, "answers things with 418"),
        (200, b"<html>", MasterError, "is a master there?"),
    ],
)
def test_a_refusal_is_an_error_of_its_kind(status: int, body: object, kind: type[MasterError], message: str) -> None:
    with answering(Say(status, body)) as server, Master(Address(server.url)) as master:
        with pytest.raises(kind, match=message) as caught:
            master.get("things")
        assert type(caught.value) is kind
        assert caught.value.status == status
        assert len(server.asked) == 1


def test_a_master_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.client._master.FIRST_PAUSE", 0.01)
    with answering(Say(503), Say(502), Say(200, {"ok": True})) as server, Master(Address(server.url)) as master:
        assert master.get("things") == {"ok": True}
        assert len(server.asked) == 3


def test_what_may_have_arrived_is_not_sent_twice_where_twice_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.client._master.FIRST_PAUSE", 0.01)
    for once, connections in ((True, 1), (False, 4)):
        count = 0
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def hang_up() -> None:
                nonlocal count
                for _ in range(connections):  # noqa: B023
                    connection, _ = listener.accept()
                    connection.recv(10_000)
                    connection.close()
                    count += 1

            thread = threading.Thread(target=hang_up)
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with Master(Address(url)) as master, pytest.raises(MasterUnreachable) as caught:
                master.post("things", {"x": 1}, once=once)
            thread.join()
        assert count == connections
        assert ("whether the request has arrived" in str(caught.value)) == once


def test_no_master_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.client._master.FIRST_PAUSE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Master(Address(f"http://127.0.0.1:{port}")) as master, pytest.raises(MasterUnreachable) as caught:
        master.get("things")
    assert str(caught.value) == f"no master answers at http://127.0.0.1:{port}: connection refused"
    with Master(Address("http://no-such-host.invalid:80")) as master, pytest.raises(MasterUnreachable):
        master.get("things")


def test_lines_come_one_by_one_and_other_requests_may_be_made_meanwhile() -> None:
    body = b"\n".join(orjson.dumps({"result": {"n": n}}) for n in range(3)) + b"\n"
    with answering(Say(200, body), Say(200, {"a": 1})) as server, Master(Address(server.url)) as master:
        with master.lines("trials/1/logs", {"after": 5}) as lines:
            assert next(lines) == {"n": 0}
            assert master.get("things") == {"a": 1}
            assert [line["n"] for line in lines] == [1, 2]
    error = orjson.dumps({"error": {"code": 13, "error": "the disk is gone"}})
    with answering(Say(200, error)) as server, Master(Address(server.url)) as master:
        with pytest.raises(MasterError, match="the disk is gone"), master.lines("trials/1/logs") as lines:
            list(lines)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("gpu1", "http://gpu1:8080"),
        ("gpu1:99", "http://gpu1:99"),
        ("http://gpu1", "http://gpu1:80"),
        ("https://gpu1/det/", "https://gpu1:443/det"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_an_address_is_made_whole(given: str, url: str) -> None:
    assert canonical(given) == url
    assert canonical(url) == url


@pytest.mark.parametrize(
    "given", ["", "http://", "http://me:pw@gpu1", "gpu1?x=1", "ftp://gpu1", "gpu1:port", "gpu1#a", "a b"]
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is no address of a master"):
        canonical(given)


def test_the_environment_and_the_home_folder_say_where_the_master_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate() is None
    folder = home / "master"
    folder.mkdir(parents=True)
    (folder / "master.json").write_text('{"url": "http://127.0.0.1:18123", "pid": 1}')
    (folder / "token").write_text("of the home\n")
    assert locate() == Address("http://127.0.0.1:18123", "of the home")
    assert locate("http://127.0.0.1:18123") == Address("http://127.0.0.1:18123", "of the home")
    monkeypatch.setenv("DET_MASTER", "gpu1")
    monkeypatch.setenv("DET_USER_TOKEN", "mine")
    assert locate() == reach() == Address("http://gpu1:8080", "mine")
    assert locate("gpu2", token="other") == Address("http://gpu2:8080", "other")
    assert locate(home=home) == Address("http://127.0.0.1:18123", "of the home")
    (folder / "master.json").write_text("torn")
    assert locate(home=home) is None


def test_answers_are_told_in_our_words() -> None:
    told = {
        "state": "STATE_ACTIVE",
        "startTime": "1970-01-01T00:00:01.5Z",
        "numTrials": 3,
        "hparams": {"learningRate": 1},
    }
    assert plain(told) == {"state": "ACTIVE", "start_time": 1.5, "num_trials": 3, "hparams": {"learningRate": 1}}
    assert seconds("1970-01-01T01:00:00+01:00") == 0.0
    assert seconds("1970-01-01T00:00:00.123456789Z") == pytest.approx(0.123456)
    assert str_to_nonfinite({"a": ["Infinity", "-Infinity"], "b": "text"}) == {
        "a": [float("inf"), float("-inf")],
        "b": "text",
    }
