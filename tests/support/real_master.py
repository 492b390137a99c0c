"""A master as a process, with trials that are processes: asked over HTTP by nothing but requests."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests

from support import nest, schema
from support.leftovers import processes_of
from support.processes import until
from support.servers import MARK

T = TypeVar("T")
ALLOCATION, BEARER = "Grpc-Metadata-x-allocation-token", "Authorization"
"""The two headers that carry a token."""
MAX_SILENCE = 120
"""Seconds without a byte of an answer, after which a request fails."""


@dataclass(frozen=True)
class Allocation:
    """Facts of an allocation that its processes have."""

    id: str
    task_id: str
    trial_id: int
    experiment_id: int
    run_id: int
    token: str


class RealMaster:
    """A master's process.

    Args:
        home: its home folder.
        options: of ``python -m det_core.master``.
    """

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        if "--db" not in options:
            schema.place(home / "master" / "master.db")
        self._options = options
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "det_core.master", "--home", str(self.home), *self._options]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DET_")} | {MARK: "1"}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        nest.keep(self.process.pid)
        path = self.home / "master" / "master.json"

        def listening() -> dict[str, Any] | None:
            assert self.process.poll() is None, "the master has ended"
            told = json.loads(path.read_text()) if path.exists() else {}
            return told if told.get("pid") == self.process.pid else None

        self.url = until(listening)["url"]
        self.token = (self.home / "master" / "token").read_text().strip()

    def kill(self) -> None:
        """Kill the master, as a crash does."""
        self.process.kill()
        self.process.wait()

    @contextmanager
    def lent(self) -> Iterator[RealMaster]:
        """Yield the master for one test; end the experiments of that test afterwards, and no others."""
        before = {experiment["id"] for experiment in self.get("experiments")["experiments"]}
        try:
            yield self
        finally:
            if self.process.poll() is not None:
                self.start()
            self._end_all_but(before)

    def _end_all_but(self, before: set[int]) -> None:
        """Kill the other experiments that go on, and wait until no process of theirs is left."""
        made = [e for e in self.get("experiments")["experiments"] if e["id"] not in before and not e["unmanaged"]]
        for experiment in made:
            if "endTime" not in experiment:
                self.ask("POST", f"experiments/{experiment['id']}/kill")
        for experiment in made:
            until(lambda number=experiment["id"]: "endTime" in self.get(f"experiments/{number}")["experiment"])
        folders = [str(self.home / "master" / "allocations" / f"{experiment['id']}.") for experiment in made]
        until(lambda: not any(folder in told for told in processes_of(self.home) for folder in folders))

    def close(self) -> None:
        """Kill what still runs, and stop it; nothing of it stays."""
        self._end_all_but(set())
        self.process.terminate()
        assert self.process.wait() == 0
        until(lambda: not processes_of(self.home))

    # requests

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str | None = "", header: str = BEARER
    ) -> requests.Response:
        """Send a request as the contract's clients do.

        ``token``: "" for that of the user, None for none at all.
        """
        shown = self.token if token == "" else token
        headers = {} if shown is None else {header: f"Bearer {shown}"}
        url = self.url + ("" if path.startswith("/") else "/api/v1/") + path
        data = None if body is None else json.dumps(body)
        return requests.request(method, url, data=data, headers=headers, allow_redirects=False, timeout=MAX_SILENCE)

    def get(self, path: str, **more: Any) -> Any:
        """Return the answer, which must be a 200."""
        return _good(self.ask("GET", path, **more))

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """Return the answer, which must be a 200."""
        return _good(self.ask("POST", path, body, **more))

    # experiments

    def create(self, config: Mapping[str, Any], files: Mapping[str, str] | None = None, **more: Any) -> int:
        """Create an experiment as the contract says (§10); returns its id."""
        entries = [
            {"path": name, "type": 48, "content": base64.b64encode(text.encode()).decode(), "mtime": "0", "mode": 420}
            for name, text in (files or {}).items()
        ]
        body = {"config": json.dumps(config), "modelDefinition": entries, "activate": True, **more}
        return int(self.post("experiments", body)["experiment"]["id"])

    def until(self, experiment_id: int, *states: str) -> dict[str, Any]:
        """Wait until the experiment is in one of these states, and return it."""

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.get(f"experiments/{experiment_id}")["experiment"]
            if found["state"] in states:
                return found
            ended = found["state"] in ("STATE_COMPLETED", "STATE_CANCELED", "STATE_ERROR")
            assert not ended, f"{found['state']}: {found.get('error')}\n{self.logs_of(experiment_id)}"
            return None

        return until(look)

    def trials(self, experiment_id: int) -> list[dict[str, Any]]:
        """Return the trials of an experiment."""
        found: list[dict[str, Any]] = self.get(f"experiments/{experiment_id}/trials")["trials"]
        return found

    def rows(self, trial_id: int, group: str, **more: str) -> list[dict[str, Any]]:
        """Return the rows of a group of metrics."""
        query = "&".join(f"{k}={v}" for k, v in {"trialIds": str(trial_id), "group": group, **more}.items())
        answer = self.ask("GET", f"trials/metrics/trial_metrics?{query}")
        assert answer.status_code == 200, answer.text
        return [row for line in answer.text.splitlines() for row in json.loads(line)["result"]["metrics"]]

    def logs(self, trial_id: int) -> list[dict[str, Any]]:
        """Return the lines of a trial's log."""
        answer = self.ask("GET", f"trials/{trial_id}/logs")
        assert answer.status_code == 200, answer.text
        return [json.loads(line)["result"] for line in answer.text.splitlines()]

    def logs_of(self, experiment_id: int) -> str:
        """Return all logs of an experiment, to show where something went wrong."""
        return "".join(line["log"] for trial in self.trials(experiment_id) for line in self.logs(trial["id"]))

    def running(self, experiment_id: int, count: int = 1) -> list[Allocation]:
        """Wait until ``count`` allocations of an experiment run, and return them."""

        def look() -> list[Allocation] | None:
            found = [t["allocationId"] for t in self.trials(experiment_id) if t.get("allocationId")]
            told = [a for a in map(self.allocation, found) if a is not None]
            return told if len(told) >= count else None

        return until(look)

    def allocation(self, allocation_id: str) -> Allocation | None:
        """Return the facts that an allocation's processes have been given, or None before that."""
        folder = self.home / "master" / "allocations" / allocation_id / "info"
        try:
            cluster = json.loads((folder / "cluster.json").read_text())
            trial = json.loads((folder / "trial.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        ids = trial["trial_id"], trial["experiment_id"], trial["trial_run_id"]
        return Allocation(allocation_id, cluster["task_id"], *ids, cluster["session_token"])


@contextmanager
def real_master(home: Path, *options: str) -> Iterator[RealMaster]:
    """Yield a running master."""
    master = RealMaster(home, *options)
    try:
        yield master
    finally:
        try:
            master.close()
        finally:
            master.kill()


def _good(answer: requests.Response) -> Any:
    assert answer.status_code == 200, f"{answer.request.method} {answer.url}: {answer.status_code} {answer.text}"
    return answer.json()
