"""Requests of a user to a master, errors in a user's words, and addresses."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from det_core.client import Master
from det_core.client._address import Address, locate, reach
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, UnknownToMaster
from support.answers import Say, answering
from support.processes import free_port


def test_request_sends_parameters_and_token() -> None:
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
        (404, {"error": {"code": 5, "error": "experiment 7 not found"}}, UnknownToMaster, "experiment 7 not found"),
        (403, {"error": {"code": 7, "error": "not yours"}}, MasterDenied, "not yours"),
        (
            401,
            {"error": {"code": 16, "error": "token missing"}},
            MasterDenied,
            "the master at .* expects .* there was none: set DET_USER_TOKEN",
        ),
        (500, {"message": "broken"}, MasterError, "broken"),
        (418, {}, MasterError, "GET .*/things: 418 I'm a"),
        (200, b"<html>", MasterError, "GET .*/things: not a master"),
    ],
)
def test_rejection_is_an_error_with_the_masters_words(
    status: int, body: object, kind: type[MasterError], message: str
) -> None:
    with answering(Say(status, body)) as server, Master(Address(server.url)) as master:
        with pytest.raises(kind, match=f"^{message}") as caught:
            master.get("things")
        assert type(caught.value) is kind
        assert caught.value.status == status
        assert len(server.asked) == 1


def test_unreachable_master_is_named_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.client._master.RETRY_TIMEOUT", 0.2)
    url = f"http://127.0.0.1:{free_port()}"
    with Master(Address(url, source="DET_MASTER")) as master, pytest.raises(MasterUnreachable) as caught:
        master.get("things")
    assert str(caught.value) == f"no master answers at {url} (DET_MASTER): connection refused"
    with Master(Address("http://no-such-host.invalid:80")) as master, pytest.raises(MasterUnreachable):
        master.get("things")


def test_lines_yields_results_while_other_requests_are_made() -> None:
    body = b"\n".join(orjson.dumps({"result": {"n": n}}) for n in range(3)) + b"\n"
    with answering(Say(200, body), Say(200, {"a": 1})) as server, Master(Address(server.url)) as master:
        with master.lines("trials/1/logs", {"after": 5, "follow": True}) as lines:
            assert next(lines) == {"n": 0}
            assert master.get("things") == {"a": 1}
            assert [line["n"] for line in lines] == [1, 2]
        assert server.asked[0][1] == "/api/v1/trials/1/logs?after=5&follow=true"
    error = orjson.dumps({"error": {"code": 13, "error": "the disk is gone"}})
    with answering(Say(200, error), Say(404)) as server, Master(Address(server.url)) as master:
        with pytest.raises(MasterError, match=r"^the disk is gone"), master.lines("trials/1/logs") as lines:
            list(lines)
        with pytest.raises(UnknownToMaster), master.lines("trials/1/logs"):
            pass


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
    monkeypatch.setenv("DET_MASTER_CERT_FILE", "noverify")
    monkeypatch.setenv("DET_MASTER_CERT_NAME", "master.example")
    assert locate() == reach() == Address("http://gpu1:8080", "mine", "noverify", "master.example")
    assert locate("gpu2", token="other") == Address("http://gpu2:8080", "other", "noverify", "master.example")
    monkeypatch.delenv("DET_MASTER_CERT_FILE")
    monkeypatch.delenv("DET_MASTER_CERT_NAME")
    assert locate(home=home) == Address("http://127.0.0.1:18123", "of the home")
    (folder / "master.json").write_text("torn")
    assert locate(home=home) is None
