"""Requests of a user to a master, errors in a user's words, and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core.client import Master
from det_core.client._master import Address, locate, reach
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, UnknownToMaster
from support.answers import Say, answering
from support.processes import free_port


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
