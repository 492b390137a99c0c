"""Threads that ask all GET routes of a master, while trials come and go."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

WITHOUT_WAITING = {"timeout_seconds": 0}
"""Query of the routes that would wait."""


REFUSED_TO_ENDED_ATTEMPTS = {
    ("/api/v1/allocations/{allocation_id}/resources/{resources_id}/rendezvous", 409),
    ("/api/v1/trials/{trial_id}/searcher/operation", 409),
}


class Readers:
    """Threads that ask routes in random order, with IDs that exist, existed or will.

    Args:
        url: address of the master.
        token: token of the user.

    Attributes:
        answers: number of answers by method path and status.
        max_trial_id: largest trial ID to ask for; experiments have IDs up to the same.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}
        paths = requests.get(f"{url}/openapi.json").json()["paths"]
        self.routes = sorted(path for path, operations in paths.items() if "get" in operations)
        self.answers: Counter[tuple[str, int]] = Counter()
        self.max_trial_id = 1
        self._stop = threading.Event()

    @contextmanager
    def asking(self, threads: int) -> Iterator[None]:
        """Ask all routes again and again, until the block is left."""
        running = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(threads)]
        for thread in running:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in running:
                thread.join()

    def unexpected(self) -> dict[tuple[str, int], int]:
        """Return the answers that are neither 200 nor 404, nor 409 where only an attempt that runs may ask."""
        answers = {answer: count for answer, count in self.answers.items() if answer[1] not in (200, 404)}
        return {answer: count for answer, count in answers.items() if answer not in REFUSED_TO_ENDED_ATTEMPTS}

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with requests.Session() as session:
            session.headers.update(self._headers)
            while not self._stop.is_set():
                for route in rng.sample(self.routes, len(self.routes)):
                    trial = rng.randint(1, self.max_trial_id)
                    path = route.format(**self._ids(trial, rng))
                    query: dict[str, Any] = {"trialIds": [trial]} if "/trials/metrics/" in route else WITHOUT_WAITING
                    status = session.get(self._url + path, params=query).status_code
                    self.answers[route, status] += 1

    def _ids(self, trial: int, rng: random.Random) -> dict[str, object]:
        experiment = rng.randint(1, self.max_trial_id)
        task = self._task_id(trial)
        return {
            "trial_id": trial,
            "experiment_id": experiment,
            "task_id": task,
            "allocation_id": f"{task}.1",
            "resources_id": "x",
            "uuid": "x",
        }

    def _task_id(self, trial: int) -> str:
        answer = requests.get(f"{self._url}/api/v1/trials/{trial}", headers=self._headers)
        return str(answer.json()["trial"]["taskId"]) if answer.status_code == 200 else "none"
