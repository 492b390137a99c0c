"""Real servers of the S3 and GCS protocols on loopback, one of each for a whole test session.

moto and the GCS emulator come with the ``dev`` extra; Ceph's gateway is a system package (``make ci`` installs it).
Each runs in processes of its own, marked by a variable in their environment, by which the leak check knows them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from support import nest, rgw
from support.processes import free_port

MARK = "DET_CORE_TEST_SERVER"


@dataclass(frozen=True)
class S3Server:
    """A running S3 server."""

    url: str
    access_key: str = rgw.KEY
    secret_key: str = rgw.SECRET
    checks_signatures: bool = False
    gateway: rgw.Gateway | None = field(default=None, repr=False)

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Yield a boto3 client, to look behind the back of the code under test."""
        import boto3

        keys = {"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret_key}
        client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **keys)
        try:
            yield client
        finally:
            client.close()

    def make_bucket(self) -> str:
        """Make a bucket and return its name."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        if self.checks_signatures:
            with self.client() as client:
                client.create_bucket(Bucket=name)
        else:  # a client of boto3 takes ten times as long to make
            urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT")).close()
        return name

    def storage(self, bucket: str, prefix: str = "", **changes: Any) -> dict[str, Any]:
        """Return the ``checkpoint_storage`` for a directory of a bucket."""
        keys = {"endpoint_url": self.url, "access_key": self.access_key, "secret_key": self.secret_key}
        return {"type": "s3", "bucket": bucket, "prefix": prefix, **keys, **changes}


@dataclass(frozen=True)
class GcsServer:
    """A running GCS emulator."""

    url: str

    def make_bucket(self) -> str:
        """Make a bucket and return its name."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        data = json.dumps({"name": name}).encode()
        request = urllib.request.Request(f"{self.url}/storage/v1/b?project=test", data, method="POST")
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request).close()
        return name


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """Yield moto: in memory, quick, and content with any key."""
    with serving_moto() as url:
        yield S3Server(url)


@contextlib.contextmanager
def serving_moto() -> Iterator[str]:
    """Run moto while the block runs; yield its URL."""
    port = free_port()
    # At every request it looks which of its 200 folders are there, and writes a line.
    code = "from moto import backends, server; folders = tuple(backends.list_of_moto_modules())\n"
    code += "backends.list_of_moto_modules = lambda: folders\n"
    code += "server.MotoRequestHandler.log_request = lambda *a, **k: None; server.main()"
    with _serving([sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)], port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def rgw_server() -> Iterator[S3Server]:
    """Yield Ceph's gateway, which checks keys, signatures and clocks; its tests lie in ``tests/stores``."""
    if reason := rgw.missing():
        if os.environ.get("CI"):
            pytest.fail(f"this is CI, and {reason}")
        pytest.skip(reason)
    with rgw.Gateway(objectstore="memstore", environment={MARK: "1"}) as gateway:
        server = S3Server(gateway.url, checks_signatures=True, gateway=gateway)
        server.make_bucket()  # the first takes seconds, as pools are made
        yield server


@pytest.fixture
def s3_server(moto_server: S3Server) -> S3Server:
    """Return the S3 server at hand; in ``tests/stores`` each in turn."""
    return moto_server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """Yield the GCS emulator, in memory."""
    port = free_port()
    words = ["start", "-H", "127.0.0.1", "--port", str(port), "-M", "-q"]
    # It has one thread and a queue of five, beyond which a connection waits for seconds. Four ranks make 128 at a time.
    code = "import socketserver; socketserver.TCPServer.request_queue_size = 1024\n"
    # It writes down all that it has at every change, to be read when it starts with a folder; here it has none.
    code += "from gcp_storage_emulator.storage import Storage; Storage._write_config_to_file = lambda self: None\n"
    # It takes what follows a ";" for parameters; gcsfs sends one in a name as it is, which RFC 3986 allows in a path.
    code += "from gcp_storage_emulator import server; from urllib.parse import urlsplit; server.urlparse = urlsplit\n"
    code += "from gcp_storage_emulator.__main__ import main; main()"
    with _serving([sys.executable, "-c", code, *words], port):
        yield GcsServer(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def _serving(command: list[str], port: int) -> Iterator[None]:
    """Run a server that listens on ``port`` while the block runs."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, MARK: "1"},
        preexec_fn=nest.end_with_parent,
    )
    nest.keep(process.pid)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, f"{' '.join(command)} ended with status {process.returncode}"
            time.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
