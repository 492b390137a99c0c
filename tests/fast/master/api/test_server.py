"""The master as a process: how it starts, listens, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from det_core.master._home import PORTS, HomeFiles, reachable
from det_core.master._options import OptionError, Options, parse
from det_core.master._server import LOG_FILE_BYTES
from support.processes import until


@contextmanager
def process(home: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a master's process; it is stopped at the end, if it runs."""
    command = [sys.executable, "-m", "det_core.master", "--home", str(home), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.terminate()
            running.wait()


def announced(home: Path, running: subprocess.Popen[str] | None = None) -> dict[str, Any]:
    """Wait until a master listens, and return its description of itself."""

    def look() -> dict[str, Any] | None:
        assert running is None or running.poll() is None, running.stderr and running.stderr.read()
        path = home / "master" / "master.json"
        return json.loads(path.read_text()) if path.exists() else None

    return until(look)


def test_it_listens_says_where_and_ends_when_told(tmp_path: Path) -> None:
    with process(tmp_path, "--slots", "2") as running:
        told = announced(tmp_path, running)
        assert (told["pid"], set(told)) == (
            running.pid,
            {"url", "pid", "start_time", "host", "version", "cluster_id", "listens", "slots_as_last_time"},
        )
        said = requests.get(f"{told['url']}/api/v1/master").json()
        assert (said["clusterId"], said["slots"]) == (told["cluster_id"], 2)
        token = tmp_path / "master" / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        assert requests.get(f"{told['url']}/api/v1/experiments", headers=headers).status_code == 200
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        assert "Traceback" not in running.stderr.read()
    assert not (tmp_path / "master" / "master.json").exists()
    with process(tmp_path) as again:  # where running trials look for it, and under the name that they know
        new = announced(tmp_path, again)
        assert (new["url"], new["cluster_id"]) == (told["url"], told["cluster_id"])
        assert (told["slots_as_last_time"], new["slots_as_last_time"]) == (False, True)
        assert requests.get(f"{new['url']}/api/v1/master").json()["slots"] == 2, "as last time"
        again.kill()
        again.wait()
    assert (tmp_path / "master" / "master.json").exists()
    with process(tmp_path) as third:
        until(lambda: announced(tmp_path, third)["pid"] == third.pid)
        assert announced(tmp_path)["url"] == told["url"]
        third.send_signal(signal.SIGINT)
        assert third.wait() == 0


def test_there_is_one_a_home(tmp_path: Path) -> None:
    with process(tmp_path) as running:
        announced(tmp_path, running)
        with process(tmp_path) as second:
            assert second.wait() == 1
            said = second.stderr.read()
        assert f"pid {running.pid}" in said
        assert "Traceback" not in said
        assert announced(tmp_path)["pid"] == running.pid, "the refused one leaves the other's file alone"


def test_a_public_address_wants_a_secret(tmp_path: Path) -> None:
    with process(tmp_path, "--host", "0.0.0.0") as refused:
        assert refused.wait() == 1
        assert "--token-file" in refused.stderr.read()
    assert not (tmp_path / "master").exists()


@pytest.mark.parametrize(
    ("text", "mode", "wrong"),
    [
        ("x" * 15, 0o600, "at least 16"),
        ("x" * 16, 0o644, "chmod 600"),
        ("two words of a secret", 0o600, "one word"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, text: str | None, mode: int, wrong: str) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(OptionError, match=wrong):
        Options(tmp_path, host="0.0.0.0", token_file=file).check()


def test_a_secret_of_ones_own_is_the_token(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a-secret-of-my-own\n")
    file.chmod(0o600)
    Options(tmp_path, host="0.0.0.0", token_file=file).check()
    files = HomeFiles(tmp_path / "master")
    files.prepare()
    made = files.token(None)
    assert files.token(None) == made
    assert len(made) >= 32
    assert files.token(file) == files.token(None) == "a-secret-of-my-own"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_every_other_address_needs_one(tmp_path: Path, host: str) -> None:
    with pytest.raises(OptionError, match="from other machines"):
        Options(tmp_path, host=host).check()


def test_the_addresses_for_trials() -> None:
    assert [reachable(h) for h in ("127.0.0.1", "0.0.0.0", "::", "::1", "box")] == [
        *("127.0.0.1", "127.0.0.1", "[::1]", "[::1]", "box")
    ]


def test_a_port_that_is_taken_is_named_and_another_is_found(tmp_path: Path) -> None:
    files = HomeFiles(tmp_path)
    with files.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert port in PORTS
        with pytest.raises(OSError, match=f"127.0.0.1 port {port}"):
            files.bind("127.0.0.1", port)
        files.announce("http://x", port, "c")
        with files.bind("127.0.0.1", 0) as second:
            assert second.getsockname()[1] != port
    with files.bind("127.0.0.1", 0) as last:
        assert last.getsockname()[1] == port, "the one of the time before"
    with socket.create_server(("127.0.0.1", 0)):
        pass


def test_the_command_line_is_understood(tmp_path: Path, home: Path) -> None:
    assert parse([]) == Options(home)
    given = parse(["--home", str(tmp_path), "--port", "1234", "--slots", "0", "--db", "sqlite:////x"])
    assert given == Options(tmp_path, port=1234, slots=0, database="sqlite:////x")
    for wrong in (["--port", "70000"], ["--slots", "-1"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_a_log_file_gets_all_output_and_stays_bounded(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    code = (
        "import logging, os, sys; from pathlib import Path; from det_core.master._server import write_log\n"
        f"write_log(Path({str(log)!r}))\n"
        "print('printed', flush=True); os.write(2, b'written\\n'); logging.info('logged')\n"
        f"for _ in range(12): logging.info('x' * {LOG_FILE_BYTES // 2})\n"
        "print('after', flush=True)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    files = sorted(os.listdir(tmp_path))
    assert files == ["master.log", "master.log.1", "master.log.2", "master.log.3"]
    assert log.read_text().endswith("after\n")


def test_empty_database_is_refused_beside_what_another_knew(tmp_path: Path) -> None:
    kept = [tmp_path / "checkpoints" / "c1" / "f", tmp_path / "master" / "allocations" / "1.r1.1" / "log"]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.write_text("kept")
    database = tmp_path / "master" / "master.db"
    database.touch()
    with process(tmp_path, "--slots", "1") as refused:
        assert refused.wait() == 1 and refused.stderr is not None
        assert f"knew what is in {kept[0].parent.parent}, " in (text := refused.stderr.read()) and "--new" in text
    assert [path.read_text() for path in kept] == ["kept", "kept"]
    with process(tmp_path, "--slots", "1", "--new") as running:
        announced(tmp_path, running)
    (unknown,) = (tmp_path / "unknown").iterdir()
    moved = [unknown / "checkpoints" / "c1" / "f", unknown / "allocations" / "1.r1.1" / "log"]
    assert [path.read_text() for path in moved] == ["kept", "kept"]
    with process(tmp_path, "--slots", "1") as again:
        announced(tmp_path, again)
