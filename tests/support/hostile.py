"""Peers that no server should trust, and trials that report beside them."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import requests

UNMANAGED = "name: load\nsearcher: {name: single, metric: unmanaged, max_length: 100000}\n"


class Api:
    """Requests of the user to a master.

    Args:
        url: address of the master.
        token: token of the user.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer, which must be a 200."""
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = requests.request(method, f"{self.url}/api/v1/{path}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def unmanaged_trials(self, count: int) -> list[int]:
        """Create unmanaged trials, begin each, and return their IDs."""
        experiment = self.ask("POST", "experiments", {"config": UNMANAGED, "unmanaged": True})["experiment"]["id"]
        body = {"experimentId": experiment, "hparams": {}, "unmanaged": True}
        trials = [self.ask("POST", "trials", body)["trial"]["id"] for _ in range(count)]
        for trial in trials:
            self.ask("POST", f"trials/{trial}/start", {"resume": False})
        return trials


class Reporting:
    """Threads that report metrics of trials, each on one connection, until they are stopped.

    Attributes:
        statuses: number of answers by status.
    """

    def __init__(self, api: Api, trials: list[int]) -> None:
        self.statuses: Counter[int | str] = Counter()
        self._api = api
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._report, args=(trial,)) for trial in trials]

    def __enter__(self) -> Reporting:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _report(self, trial: int) -> None:
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {self._api.token}"
            step = 0
            while not self._stop.wait(0.1):
                step += 1
                values = {"trialRunId": 1, "stepsCompleted": step, "metrics": {"avgMetrics": {"loss": 1 / step}}}
                url = f"{self._api.url}/api/v1/trials/{trial}/metrics"
                try:
                    status: int | str = session.post(url, json={"group": "training", "metrics": values}).status_code
                except requests.RequestException as e:
                    status = repr(e)
                self.statuses[status] += 1


def long_log(api: Api, trial: int, lines: int) -> str:
    """Write a log that fills the buffers between two sockets; return its path."""
    task = api.ask("GET", f"trials/{trial}")["trial"]["taskId"]
    for _ in range(0, lines, 500):
        api.ask("POST", "task/logs", {"logs": [{"task_id": task, "log": "x" * 1000}] * 500})
    return f"/api/v1/trials/{trial}/logs"


@contextmanager
def hostile_peers(api: Api, log_path: str, count: int) -> Iterator[list[socket.socket]]:
    """Yield connections with half of a request's headers or of a body; of ten, one reads nothing of a long answer."""
    host, port = api.url.removeprefix("http://").split(":")
    login = json.dumps({"username": "x", "password": "x" * 10_000}).encode()
    halves = (
        b"GET /api/v1/master HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /api/v1/auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(login) + login[:-1],
    )
    slow_reader = f"GET {log_path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api.token}\r\n\r\n".encode()
    with ExitStack() as stack:
        peers = []
        for number in range(count):
            peers.append(stack.enter_context(socket.socket()))
            # A small window: what is not read fills the buffers of the server at once.
            peers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peers[-1].connect((host, int(port)))
            peers[-1].sendall(slow_reader if number % 10 == 9 else halves[number % 2])
        yield peers


class Peer:
    """A connection that sends what a test says and keeps its end open."""

    def __init__(self, url: str, sent: bytes = b"") -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(sent)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def answer(self) -> bytes:
        """Return what comes, until the body of one answer is complete."""
        text = b""
        while b"\r\n\r\n" not in text or not text.endswith(b"}"):
            text += self.socket.recv(1 << 16)
        return text

    def rest(self) -> bytes:
        """Return what comes until the master closes the connection."""
        text = b""
        try:
            while part := self.socket.recv(1 << 16):
                text += part
        except ConnectionResetError:  # aborted
            pass
        return text
