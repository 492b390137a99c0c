"""Calls that the contract's clients of both generations share, written from the contract with requests alone."""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter, Retry

CHECKPOINT = {"metadata", "resources", "state", "training", "uuid"}
TRIAL = {"experimentId", "hparams", "id", "restarts", "startTime", "state", "totalBatchesProcessed"}
"""The keys without which the contract's bindings fail (§4)."""


def _cluster(
    *,
    master_url: str,
    cluster_id: str,
    agent_id: str,
    slot_ids: list[int],
    task_id: str,
    allocation_id: str,
    session_token: str,
    task_type: str,
    master_cert_name: str | None = None,
    master_cert_file: str | None = None,
    latest_checkpoint: str | None = None,
) -> dict[str, Any]:
    """Read cluster.json: a key too many or too few is a TypeError (§3.1)."""
    return dict(locals())


def _trial(
    *,
    trial_id: int,
    experiment_id: int,
    trial_seed: int,
    hparams: dict[str, Any],
    config: dict[str, Any],
    steps_completed: int,
    trial_run_id: int,
    debug: bool,
    inter_node_network_interface: str | None,
) -> dict[str, Any]:
    return dict(locals())


def _rendezvous(*, container_addrs: list[str], container_rank: int, container_slot_counts: list[int]) -> dict[str, Any]:
    return dict(locals())


def plain(value: Any) -> Any:
    """Convert numbers that are not finite to the strings of §2.1."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class Trial:
    """A trial's process as a client sees it.

    Args:
        info: the folder of the information files.
        old: of the generation before 0.37, which shows the user's token.
    """

    def __init__(self, info: Path, *, old: bool = False) -> None:
        self.cluster = _cluster(**json.loads((info / "cluster.json").read_text()))
        told = _trial(**json.loads((info / "trial.json").read_text()))
        peers = _rendezvous(**json.loads((info / "rendezvous.json").read_text()))
        assert isinstance(json.loads((info / "resources.json").read_text())["gpu_uuids"], list)
        assert self.cluster["task_type"] == "TRIAL" == os.environ["DET_TASK_TYPE"]
        assert (len(peers["container_addrs"]), peers["container_rank"]) == (1, 0)
        assert peers["container_slot_counts"] == [len(self.cluster["slot_ids"])]
        self.id, self.experiment_id, self.run_id = told["trial_id"], told["experiment_id"], told["trial_run_id"]
        self.config, self.hparams, self.started_at = told["config"], told["hparams"], told["steps_completed"]
        self.allocation = self.cluster["allocation_id"]
        assert os.environ["DET_ALLOCATION_ID"] == self.allocation == f"{self.cluster['task_id']}.{self.run_id}"
        self._session = requests.Session()
        self._session.mount("http://", HTTPAdapter(max_retries=Retry(20, backoff_factor=0.5, allowed_methods=None)))
        if old:
            self._session.headers["Authorization"] = f"Bearer {os.environ['DET_USER_TOKEN']}"
        else:
            token = os.environ["DET_SESSION_TOKEN"]
            self._session.headers["Grpc-Metadata-x-allocation-token"] = f"Bearer {token}"
        assert os.environ["DET_USER"]
        self._reports: queue.Queue[Any] = queue.Queue(1000)
        self._failure: BaseException | None = None
        self._preempt, self._first, self._acked = threading.Event(), threading.Event(), False

    # requests

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 120) -> Any:
        """Send a request as text without a content type; the only good answer is a 200."""
        answer = self.answer(method, path, body, timeout)
        if answer.status_code != 200:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json()

    def answer(self, method: str, path: str, body: Any = None, timeout: float = 120) -> requests.Response:
        """Send a request and return any answer."""
        text = None if body is None else json.dumps(plain(body))
        url = f"{self.cluster['master_url']}/{path}"
        request = self._session.prepare_request(requests.Request(method, url, data=text))
        assert "Content-Type" not in request.headers
        return self._session.send(request, timeout=timeout, allow_redirects=False)

    # the life of a context (§5.9)

    def start(self) -> None:
        """Start as ``core.init()`` does: the run's start, then preemption and metrics have threads of their own."""
        body = {"runId": self.id, "checkpointStorage": self.config["checkpoint_storage"]}
        self.storage_id = self.ask("POST", "api/v1/runs/start", body)["storageId"]
        assert type(self.storage_id) is int
        threading.Thread(target=self._watch, daemon=True).start()
        self._poster = threading.Thread(target=self._post, daemon=True)
        self._poster.start()

    def close(self) -> None:
        """Wait until all reports have arrived."""
        self._reports.put(None)
        self._poster.join()
        if self._failure is not None:
            raise self._failure

    # metrics (§5.2)

    def report(self, group: str, steps: int | None, metrics: Mapping[str, Any], **more: Any) -> None:
        """Queue a report. ``more``: batches, time."""
        if self._failure is not None:
            raise self._failure
        self._reports.put((group, steps, metrics, more.get("batches"), more.get("time")))

    def _post(self) -> None:
        try:
            while (found := self._reports.get()) is not None:
                group, steps, metrics, batches, time = found
                values = {"avgMetrics": metrics, "batchMetrics": batches}
                body = {"trialId": self.id, "trialRunId": self.run_id, "stepsCompleted": steps, "reportTime": time}
                told = {"group": group, "metrics": {**body, "metrics": values}}
                assert self.ask("POST", f"api/v1/trials/{self.id}/metrics", told) == {}
        except BaseException as e:
            self._failure = e

    # preemption (§5.6)

    def _watch(self) -> None:
        seconds = 0
        while True:
            path = f"api/v1/allocations/{self.allocation}/signals/preemption?timeout_seconds={seconds}"
            if self.ask("GET", path, timeout=seconds + 10)["preempt"]:
                self._preempt.set()
                self._first.set()
                return
            self._first.set()
            seconds = 60

    def should_preempt(self) -> bool:
        """Return whether to stop; acknowledge the first time."""
        assert self._first.wait()
        if self._preempt.is_set():
            self.acknowledge()
        return self._preempt.is_set()

    def wait_for_preemption(self) -> None:
        """Wait until it is to stop."""
        assert self._preempt.wait()

    def acknowledge(self) -> None:
        """Say that it noticed; once."""
        if not self._acked:
            self.ask("POST", f"api/v1/allocations/{self.allocation}/signals/ack_preemption")
            self._acked = True

    # checkpoints (§5.7, §16.1)

    def _store(self) -> Path:
        storage = self.config["checkpoint_storage"]
        if storage["type"] == "shared_fs":
            return Path("/determined_shared_fs", storage.get("storage_path") or "")
        return Path(storage["container_path"])

    def save(self, steps: int) -> str:
        """Write a checkpoint, and report it."""
        name = str(uuid.uuid4())
        folder = self._store() / name
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "steps").write_text(str(steps))
        metadata = {"steps_completed": steps, "by": self.id}
        (folder / "metadata.json").write_text(json.dumps(metadata))
        size = (folder / "metadata.json").stat().st_size
        body = {
            "uuid": name,
            "taskId": self.cluster["task_id"],
            "allocationId": self.allocation,
            "storageId": self.storage_id,
            "metadata": metadata,
            "resources": {"sub/": "0", "sub/steps": str(len(str(steps))), "metadata.json": str(size)},
            "state": "STATE_COMPLETED",
            "training": {},
            "reportTime": "2024-01-01T00:00:00.000000+00:00",
        }
        assert self.ask("POST", "api/v1/checkpoints", body) == {}
        return name

    def remove(self, name: str, *, whole: bool) -> None:
        """Remove a checkpoint's files, or one of them."""
        if whole:
            shutil.rmtree(self._store() / name)
        else:
            (self._store() / name / "metadata.json").unlink()

    def restore(self) -> int:
        """Return the step to resume from: that of the given checkpoint, or 0."""
        name = self.cluster["latest_checkpoint"]
        if name is None:
            return 0
        found = self.ask("GET", f"api/v1/checkpoints/{name}")["checkpoint"]
        assert set(found) >= CHECKPOINT and found["uuid"] == name and found["state"] == "STATE_COMPLETED"
        steps = int((self._store() / name / "sub" / "steps").read_text())
        assert found["metadata"] == {"steps_completed": steps, "by": self.id}
        assert self.started_at == steps == int(os.environ["DET_STEPS_COMPLETED"])
        return steps

    # what tests want of a script

    def loss(self, steps: int) -> float:
        """Return the metric after ``steps`` steps."""
        return float(self.hparams["lr"]) + 1 / (1 + steps)

    def obey(self, steps: int) -> None:
        """Fail, or wait for preemption, where the hyperparameters say so."""
        if self.run_id == 1 and steps == self.hparams.get("fail_at"):
            self.close()
            print("ERROR: [1] recipe: it fails", file=sys.stderr, flush=True)
            os._exit(3)
        if steps == self.hparams.get("wait_at"):
            self.wait_for_preemption()
