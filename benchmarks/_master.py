"""A master to be measured: this repository's, as a process of its own in an empty folder."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from det_core.master._options import Options
from det_core.master._server import run
from det_core.master.engines import Ended, LaunchSpec, Listener

TIMEOUT = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


class Api:
    """One connection to a master."""

    def __init__(self, url: str, token: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT)
        self._headers = {"Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the answer, read as JSON (or as lines of it)."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        self._connection.request(method, f"/api/v1/{path}", data, self._headers)
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {text.decode()}")
        return json.loads(text) if response.headers["content-type"] == "application/json" else text.splitlines()


class Master:
    """A running master. ``url`` and ``token`` are how it is reached, ``pid`` is its process."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.home, self.pid = home, process.pid
        said = home / "master" / "master.json"
        deadline = time.monotonic() + TIMEOUT
        while not said.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the master does not start (exit status {process.poll()})")
            time.sleep(0.01)
        self.url = str(json.loads(said.read_text())["url"])
        self.token = (home / "master" / "token").read_text().strip()

    def api(self) -> Api:
        """A connection of the user's."""
        return Api(self.url, self.token)

    def cpu(self) -> float:
        """Seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def peak(self) -> float:
        """The most memory that it has had at a time, in bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def running(*options: str, module: str = "det_core.master") -> Iterator[Master]:
    """A master in a folder of its own, until the block ends.

    Args:
        options: of its command line.
        module: what is run; ``benchmarks._master`` is one that runs no processes.
    """
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as folder:
        command = [sys.executable, "-m", module, "--home", folder, *options]
        process = subprocess.Popen(command)
        try:
            yield Master(Path(folder), process)
        finally:
            process.terminate()
            process.wait(TIMEOUT)


class IdleEngine:
    """Runs nothing, and writes down which allocations it was given, with their tokens, a JSON object a line."""

    def __init__(self, slots: int, file: Path) -> None:
        self.slots = list(range(slots))
        self._file = file

    async def recover(self, known: Mapping[str, str | None], listener: Listener) -> None:
        """There is nothing to adopt."""

    async def launch(self, spec: LaunchSpec) -> None:
        """Write it down."""
        with open(self._file, "a") as file:
            file.write(json.dumps([spec.allocation_id, spec.session_token]) + "\n")

    async def kill(self, allocation_id: str) -> None:
        """There is nothing to kill."""

    async def terminate(self, allocation_id: str, grace: float) -> None:
        """There is nothing to end."""

    async def events(self) -> AsyncIterator[Ended]:
        """Nothing ever ends."""
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async def forget(self, allocation_id: str) -> None:
        """There is nothing to forget."""

    async def close(self) -> None:
        """There is nothing to close."""


def main() -> None:
    """Run a master with an idle engine: ``--home DIR --slots N``."""
    home, slots = Path(sys.argv[2]), int(sys.argv[4])
    run(Options(home), IdleEngine(slots, home / "launched.jsonl"))


if __name__ == "__main__":
    main()
