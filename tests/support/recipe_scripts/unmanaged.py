"""A script that no master starts, and that reports to one all the same, as the contract's unmanaged mode does (§9).

Usage: unmanaged.py MASTER PASSWORD LENGTH STORE [fail]
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests

EXPERIMENT = {
    *("archived", "config", "id", "jobId", "name", "numTrials", "originalConfig", "projectId", "projectOwnerId"),
    *("searcherType", "startTime", "state", "username"),
}
TRIAL = {"experimentId", "hparams", "id", "restarts", "startTime", "state", "totalBatchesProcessed", "taskId"}
CONFIG = """
checkpoint_storage: {type: directory, container_path: %s}
data: null
description: null
labels: null
name: recipe unmanaged
project: null
workspace: null
searcher: {name: single, metric: unmanaged, max_length: 100000000}
"""


class Client:
    """A user's connection to a master."""

    def __init__(self, url: str, password: str) -> None:
        self._url, self._session = url, requests.Session()
        hashed = hashlib.sha512(("GubPEmmotfiK9TMD6Zdw" + password).encode()).hexdigest()
        body = {"username": "determined", "password": hashed, "isHashed": True}
        login = self.ask("POST", "/api/v1/auth/login", body)
        assert {"username", "active", "admin"} <= set(login["user"])
        self._session.headers["Authorization"] = f"Bearer {login['token']}"
        assert self.ask("GET", "/api/v1/me")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request as text without a content type; the only good answer is a 200."""
        data = None if body is None else json.dumps(body)
        answer = self._session.request(method, self._url + path, data=data, allow_redirects=False)
        assert answer.status_code == 200, (method, path, answer.status_code, answer.text)
        return answer.json()


def main(client: Client, length: int, store: Path, fail: bool) -> int:
    """Go on from the latest checkpoint, if there is one; returns the step."""
    body = {"config": CONFIG % store, "unmanaged": True}
    name = quote(f"recipe {store}", safe="")
    experiment = client.ask("PUT", f"/api/v1/experiments/by-external-id/{name}", body)["experiment"]
    assert set(experiment) >= EXPERIMENT
    wanted = {"experimentId": experiment["id"], "hparams": {"lr": 0.5}, "unmanaged": True}
    trial = client.ask("PUT", "/api/v1/trials", {"createTrialRequest": wanted, "externalTrialId": "T1"})["trial"]
    assert set(trial) >= TRIAL
    path = f"/api/v1/trials/{trial['id']}"
    assert client.ask("GET", "/api/v1/master")["clusterId"]
    begun = client.ask("POST", f"{path}/start", {"trialId": trial["id"], "resume": True})
    step, latest = begun["stepsCompleted"], begun.get("latestCheckpoint")
    storage = {"type": "directory", "container_path": str(store)}
    storage_id = client.ask("POST", "/api/v1/runs/start", {"runId": trial["id"], "checkpointStorage": storage})[
        "storageId"
    ]
    if latest is not None:
        assert int((store / latest / "steps").read_text()) == step
    client.ask("PATCH", path, {"trialId": trial["id"], "state": "STATE_RUNNING"})
    client.ask("PATCH", path, {"trialId": trial["id"]})
    while step < length:
        step += 1
        values = {"avgMetrics": {"loss": 1 / step}, "batchMetrics": None}
        told = {"trialId": trial["id"], "trialRunId": begun["trialRunId"], "stepsCompleted": step, "reportTime": None}
        for group in ("training", "validation"):
            client.ask("POST", f"{path}/metrics", {"group": group, "metrics": {**told, "metrics": values}})
    saved = str(uuid.uuid4())
    (store / saved).mkdir(parents=True)
    (store / saved / "steps").write_text(str(step))
    report = {"uuid": saved, "taskId": trial["taskId"], "allocationId": None, "storageId": storage_id}
    more = {"metadata": {"steps_completed": step}, "resources": {"steps": "1"}, "state": "STATE_COMPLETED"}
    client.ask("POST", "/api/v1/checkpoints", {**report, **more, "training": {}, "reportTime": None})
    line = {"task_id": trial["taskId"], "timestamp": "2024-01-01T00:00:00Z", "rank": "0", "log": f"came to {step}\n"}
    client.ask("POST", "/task-logs", [line])
    client.ask("PATCH", path, {"trialId": trial["id"], "state": "STATE_ERROR" if fail else "STATE_COMPLETED"})
    return int(trial["id"])


if __name__ == "__main__":
    print(main(Client(sys.argv[1], sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:] == ["fail"]))
