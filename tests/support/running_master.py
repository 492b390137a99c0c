"""A master in this process: real application, service, store and sockets; an engine that ends trials as a test says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import requests
import uvicorn
from sqlalchemy.orm import Session

from det_core.master._options import Options
from det_core.master.api import Limits, create_app, server_config
from det_core.master.api._limits import DEFAULT_LIMITS
from det_core.master.engines import Pool
from det_core.master.service import ServiceState, _lifecycle
from det_core.master.store import Store
from support import schema
from support.processes import until
from support.scripted_engine import Launched, ScriptedEngine

T = TypeVar("T")
TOKEN = "the-user's-own-secret-token"
MAX_SILENCE = 120
"""Seconds without a byte of an answer, after which a request fails."""
CONFIG = """
name: test
entrypoint: "true"
searcher: {name: single, metric: loss, max_length: 10}
max_restarts: 0
"""


def _connect(session: Session) -> None:
    session.connection()
    time.sleep(0.05)


class Answer:
    """An answer of the API."""

    def __init__(self, response: requests.Response) -> None:
        self.status = response.status_code
        self.text = response.text
        self.headers = response.headers

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.text)

    @property
    def lines(self) -> list[Any]:
        """The body's lines."""
        return [json.loads(line)["result"] for line in self.text.splitlines() if line]

    @property
    def error(self) -> dict[str, Any]:
        """The error's content."""
        found: dict[str, Any] = self.json["error"]
        return found


class Running:
    """A master that listens.

    Attributes:
        url: where.
        token: the user's.
        engine: what ends allocations as the test says.
        service: what the API calls.
    """

    def __init__(self, folder: Path, limit: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self.token = TOKEN
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(folder, limit, limits)), name="master")
        self._thread.start()
        until(lambda: self._ready.is_set() or not self._thread.is_alive())
        assert self._ready.is_set(), "the master has failed"

    async def _live(self, folder: Path, limit: int, limits: Limits) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.engine = ScriptedEngine(Pool(256))
        schema.place(folder / "master.db")
        self.store = store = Store.open(f"sqlite:///{folder / 'master.db'}")
        self.service = ServiceState(store, self.engine, Options(home=folder, cluster_id="the-cluster"))
        await _lifecycle.start(self.service)
        # A session connects when it is first used; a test that made it do so would seem to leave an open file.
        reads = [read(_connect) for read in (store.read, store.read_series) for _ in range(8)]
        await asyncio.gather(*reads)
        for threads in (self.service.log_readers, self.service.log_writer):
            for _ in range(2):
                threads.submit(time.sleep, 0.05)
        self.app = create_app(self.service, TOKEN, max_body_bytes=limit)
        self.server = server = uvicorn.Server(server_config(self.app, limits, port=0))
        serving = asyncio.ensure_future(server._serve())
        while not server.started:
            assert not serving.done(), "the server has ended before it listened"
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        self.service.subscriptions.close()
        server.should_exit = True
        await serving
        await _lifecycle.stop(self.service)
        await store.close()

    def close(self) -> None:
        """Stop it. Twice is fine."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the master's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(MAX_SILENCE)

    def ask(self, method: str, path: str, body: Any = None, token: str | None = TOKEN, **more: Any) -> Answer:
        """Send a request as the contract's clients do: JSON without a content type."""
        headers = {"Grpc-Metadata-x-allocation-token": f"Bearer {token}"} if token else {}
        headers |= more.pop("headers", {})
        data = None if body is None else body if isinstance(body, (bytes, Iterator)) else json.dumps(body)
        url = self.url + ("" if path.startswith("/") else "/api/v1/") + path
        more.setdefault("timeout", MAX_SILENCE)
        with requests.request(method, url, data=data, headers=headers, allow_redirects=False, **more) as response:
            return Answer(response)

    def created(self, config: str = CONFIG, **more: Any) -> int:
        """Create an experiment and return its ID."""
        answer = self.ask("POST", "experiments", {"config": config, **more})
        assert answer.status == 200, answer.text
        return int(answer.json["experiment"]["id"])

    def launched(self, experiment_id: int, count: int = 1) -> list[Launched]:
        """Wait until ``count`` allocations of an experiment run, and return them."""
        return until(lambda: self._running(experiment_id, count))

    def _running(self, experiment_id: int, count: int) -> list[Launched] | None:
        found = [s for s in list(self.engine.running.values()) if s.experiment_id == experiment_id]
        return found if len(found) >= count else None

    def a_trial(self, config: str = CONFIG, **more: Any) -> Launched:
        """Create an experiment and return the allocation of its first trial."""
        return self.launched(self.created(config, **more))[0]

    def post(self, path: str, body: Any) -> Any:
        """Return the answer to a POST, which must be a 200."""
        answer = self.ask("POST", path, body)
        assert answer.status == 200, answer.text
        return answer.json

    def report(self, spec: Launched, group: str, step: int, metrics: dict[str, Any]) -> None:
        """Report metrics of a trial."""
        body = {"trialRunId": spec.trial_run_id, "stepsCompleted": step, "metrics": {"avgMetrics": metrics}}
        self.post(f"trials/{spec.trial_id}/metrics", {"group": group, "metrics": body})

    def log(self, spec: Launched, *texts: str, **fields: Any) -> None:
        """Send lines of a trial's log."""
        line = {"task_id": spec.task_id, "allocation_id": spec.allocation_id, "timestamp": "2026-01-01T00:00:00Z"}
        self.post("task/logs", {"logs": [{**line, "log": text, **fields} for text in texts]})

    def complete(self, spec: Launched, length: int, metric: float) -> None:
        """Complete the operation of a trial."""
        body = {"op": {"length": length}, "searcherMetric": metric}
        self.post(f"trials/{spec.trial_id}/searcher/completed_operation", body)

    def end(self, allocation_id: str, status: int = 0) -> None:
        """Let the script exit."""

        async def ended() -> None:
            self.engine.end(allocation_id, status)

        self.run(ended())

    def until(self, experiment_id: int, state: str) -> dict[str, Any]:
        """Wait until the experiment is in that state, and return it."""

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.ask("GET", f"experiments/{experiment_id}").json["experiment"]
            return found if found["state"] == state else None

        return until(look)
