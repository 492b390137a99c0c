"""Master to measure: this repository's, in its own process and an empty directory.

``python -m benchmarks._master --home DIR --slots N`` starts one whose engine runs no processes; with ``--instant`` its
allocations end at once, as a script that exits with status 0.
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks._processes import HANGS, ROOT, environment
from det_core.master._options import Options
from det_core.master._server import run
from det_core.master.engines import Pool, Ticket

sys.path.insert(0, str(ROOT / "tests"))
from support.scripted_engine import ScriptedEngine  # type: ignore[import-not-found]

T = TypeVar("T")


class Api:
    """Connection to a master."""

    def __init__(self, url: str, token: str) -> None:
        # Kept open: a connection for each request would be in the figures of whatever is requested.
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=HANGS)
        self._headers = {"Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the answer, read as JSON (or as lines of it)."""
        if isinstance(body, bytes) or body is None:
            data = body
        else:
            data = json.dumps(body).encode()
        self._connection.request(method, f"/api/v1/{path}", data, self._headers)
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {text.decode()}")
        if response.headers["content-type"] == "application/json":
            return json.loads(text)
        return text.splitlines()

    def create(self, config: Mapping[str, Any], **more: Any) -> int:
        """Create an experiment and return its number."""
        return int(self.ask("POST", "experiments", {"config": config, **more})["experiment"]["id"])


class Master:
    """Running master, with its ``url``, its ``token`` and the ``pid`` of its process."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.home = home
        self.pid = process.pid
        said = home / "master" / "master.json"
        # The master writes it last, once it listens.
        until(said.exists, process.poll)
        self.url = str(json.loads(said.read_text())["url"])
        self.token = (home / "master" / "token").read_text().strip()

    def api(self) -> Api:
        """Open a connection as the user."""
        return Api(self.url, self.token)

    def cpu(self) -> float:
        """Return the seconds of processor time that it has used."""
        # The second field is the program's name in parentheses, and may itself have spaces and parentheses.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak(self) -> float:
        """Return its peak memory in bytes."""
        # The kernel's own mark: samples of the present size would miss a short peak.
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def running(slots: int, module: str = "det_core.master", *, tree: Path = ROOT) -> Iterator[Master]:
    """Run a master in a directory of its own until the block ends; ``benchmarks._master`` starts no processes."""
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as folder:
        with running_at(Path(folder), slots, module, tree=tree) as master:
            yield master


@contextmanager
def running_at(home: Path, slots: int, module: str, *options: str, tree: Path = ROOT) -> Iterator[Master]:
    """Run a master of a home directory, with the code of a tree, until the block ends."""
    command = [sys.executable, "-m", module, "--home", str(home), "--slots", str(slots), *options]
    # In the home: ``-m`` imports from the working directory first, where this tree would hide another one.
    process = subprocess.Popen(command, env=environment(home, tree), cwd=home)
    try:
        yield Master(home, process)
    finally:
        process.terminate()
        process.wait(HANGS)


def until(look: Callable[[], T], ended: Callable[[], int | None] = lambda: None) -> T:
    """Poll every two milliseconds until ``look`` returns a true value, and return it.

    Raises:
        RuntimeError: If the process that should bring it has ended, or hangs.
    """
    deadline = time.monotonic() + HANGS
    while not (found := look()):
        if (status := ended()) is not None or time.monotonic() > deadline:
            raise RuntimeError(f"what is waited for does not come (exit status {status})")
        time.sleep(0.002)
    return found


class IdleEngine(ScriptedEngine):  # type: ignore[misc]
    """Engine that runs no processes, and writes its allocations with their tokens, a JSON object a line."""

    async def launch(self, ticket: Ticket) -> None:
        await super().launch(ticket)
        with open(FILE, "a") as file:
            file.write(json.dumps([ticket.allocation_id, self.running[ticket.allocation_id].session_token]) + "\n")


class InstantEngine(ScriptedEngine):  # type: ignore[misc]
    """Engine that runs no processes, and whose allocations end at once."""

    async def launch(self, ticket: Ticket) -> None:
        await super().launch(ticket)
        self.end(ticket.allocation_id)
        self.launched.clear()  # the memory that is measured is the master's


if __name__ == "__main__":
    FILE = Path(sys.argv[2], "launched.jsonl")
    engine = InstantEngine if "--instant" in sys.argv else IdleEngine
    run(Options(Path(sys.argv[2])), engine(Pool(int(sys.argv[4]))))
