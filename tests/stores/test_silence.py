"""A store that stops answering keeps no process beyond the grace period, on the real clients of the three services."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import nest
from support.processes import free_port, until
from support.proxy import SILENT, Request, proxy_before
from support.servers import MARK, GcsServer, S3Server

uuid.uuid1()  # libuuid, which azure asks for names, keeps a file open from now on
GRACE = 8.0
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The one that every Azurite has."""
TRAIN = """
import json, sys, time
from det_core import core

with core.init(
    checkpoint_storage=json.loads(sys.argv[1]), name="silence", tensorboard_mode=core.TensorboardMode.MANUAL
) as ctx:
    def save(step):
        with ctx.checkpoint.store_path({"steps_completed": step}, blocking=False) as (path, _):
            (path / "weights").write_bytes(bytes(9 << 20))
    if sys.argv[2] == "one committed":
        save(1)
        ctx.checkpoint.begin({"steps_completed": 0}).abort()  # waits for the one before
    ctx.preempt.should_preempt()
    print("ready", flush=True)
    sys.stdin.readline()
    save(9)
    print("saving", flush=True)
    while not ctx.preempt.should_preempt():
        time.sleep(0.01)
    print("stopped", flush=True)
"""


@pytest.fixture(params=["s3", "gcs", "azure"])
def kind(request: pytest.FixtureRequest) -> str:
    """Serve S3."""
    found: str = request.param
    return found


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Yield the address of a service, and a bucket there."""
    if kind == "azure":
        with azurite() as url:
            yield url, "test"
        return
    running: S3Server | GcsServer = request.getfixturevalue("moto_server" if kind == "s3" else "gcs_server")
    yield running.url, running.make_bucket()


@contextmanager
def azurite() -> Iterator[str]:
    """Yield Azurite with a container, if npm has installed it (``npm install -g azurite``)."""
    if shutil.which("azurite-blob") is None:
        pytest.skip("azurite-blob is not installed: npm install -g azurite")
    from azure.storage.blob import BlobServiceClient

    port = free_port()
    command = ["azurite-blob", "--blobPort", str(port), "--silent", "--skipApiVersionCheck", "--inMemoryPersistence"]
    command.append("--disableTelemetry")
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, MARK: "1"}
    )
    nest.keep(process.pid)
    try:
        until(lambda: _listens(port) or process.poll() is not None)
        url = f"http://127.0.0.1:{port}"
        with BlobServiceClient.from_connection_string(storage("azure", url, "")["connection_string"]) as client:
            client.create_container("test")
        yield url
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def storage(kind: str, url: str, bucket: str) -> dict[str, Any]:
    """Return the ``checkpoint_storage`` for a service at an address."""
    if kind == "azure":
        account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={KEY}"
        return {
            "type": kind,
            "container": bucket,
            "connection_string": f"{account};BlobEndpoint={url}/devstoreaccount1;",
        }
    keys = {"access_key": "key", "secret_key": "secret"} if kind == "s3" else {}
    return {"type": kind, "bucket": bucket, "prefix": "p", "endpoint_url": url, **keys}


class Training:
    """A script in a process of its own, and the lines that it has said."""

    def __init__(self, folder: Path, settings: dict[str, Any], form: str) -> None:
        command = [sys.executable, "-c", TRAIN, json.dumps(settings), form]
        environment = {**os.environ, "DET_CORE_GRACE": str(GRACE)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, line: str) -> None:
        """Wait until it has said a line."""
        until(lambda: line in self.lines or not self._reader.is_alive())
        assert line in self.lines, self.lines

    def go_on(self) -> None:
        """Let it save."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def seconds_to_its_end(self, since: float) -> float:
        """Wait until the process is gone."""
        self.process.wait()
        seconds = time.monotonic() - since
        self._reader.join()
        self.process.stdin.close()
        self.process.stdout.close()
        return seconds


def _table(kind: str, form: str, seconds: float) -> None:
    print(f"\n| {kind} | {form} | {seconds:.1f} s |")


@pytest.mark.parametrize("form", ["none committed", "one committed", "silent before"])
def test_process_exits_when_its_grace_period_ends(
    kind: str, server: tuple[str, str], form: str, tmp_path: Path
) -> None:
    url, bucket = server
    is_silent = threading.Event()

    def plan(_: int, request: Request) -> str | None:
        if form == "silent before" or (request.method != "GET" and "weights" in request.path):
            is_silent.set()
        return SILENT if is_silent.is_set() else None

    with proxy_before(url) as proxy:
        training = Training(tmp_path, storage(kind, proxy.url, bucket), form)
        training.wait_for("ready")
        proxy.begin(plan)
        training.go_on()
        training.wait_for("saving")  # the call returns, whatever the store does
        until(lambda: is_silent.is_set() or training.process.poll() is not None)
        signalled = time.monotonic()
        training.process.send_signal(signal.SIGTERM)
        _table(kind, form, training.seconds_to_its_end(signalled))
    assert training.process.returncode == 1
    said = training.lines[-1]
    assert "was not saved in the background" in said
    saved = "steps_completed 1" if form == "one committed" else "no checkpoint of this run is saved"
    assert said.endswith(saved), said
    assert not any("never retrieved" in line for line in training.lines)


@pytest.mark.parametrize("how", ["silence", "refused"])
def test_init_with_a_silent_store_fails_in_one_line(kind: str, how: str, tmp_path: Path) -> None:
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        if how == "silence":
            silent.listen()  # connections are made, and nothing comes
        url = "http://{}:{}".format(*silent.getsockname())
        training = Training(tmp_path, storage(kind, url, "bucket"), "")
        _table(kind, f"init, {how}", training.seconds_to_its_end(training.began))
    assert training.process.returncode == 1
    (said,) = [line for line in training.lines if line.startswith("det_core.errors.StorageError: ")]
    assert "is it the right address" in said or "is the address right" in said
    ours = [line for line in training.lines if line.startswith(("Traceback", "  File", "    ")) or line == said]
    assert training.lines == ours, "a library made noise"
