"""A small master that answers exactly as the wire contract says that a foreign one of a given release does.

It keeps the reports in plain lists and dictionaries, for tests to look at. Releases before 0.37 take a user's token
only; from 0.38 on there are no searcher operations. It has no journal route, semantic rejections are 500s, unknown
routes are 501s, and success is 200 and nothing else.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

SYSTEM = ("gpu", "cpu", "memory", "disk", "network")
NAMES = {3: (400, "InvalidArgument"), 5: (404, "NotFound"), 12: (501, "Unimplemented"), 2: (500, "Unknown")}
NAMES |= {16: (401, "Unauthenticated"), 7: (403, "PermissionDenied")}


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Asked(NamedTuple):
    """A request that was seen."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    allocation: bool
    """Whether it showed an allocation's token."""


class Trial:
    """A trial and the reports on it."""

    def __init__(self, trial_id: int, lengths: list[int], config: dict[str, Any]) -> None:
        self.trial_id, self.lengths, self.config = trial_id, lengths, config
        self.task_id = f"1.request-{trial_id}"
        self.run_id = 0
        self.done = 0
        self.completed: list[tuple[int, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.progress: list[Any] = []
        self.states: list[str] = []
        self.metadata: dict[str, Any] = {}
        self.exits: list[str] = []
        self.unmanaged_state = ""

    @property
    def allocation_id(self) -> str:
        return f"{self.task_id}.{self.run_id}"


class ForeignMaster:
    """A running master.

    Args:
        version: its release.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self.cluster_id = "the-cluster"
        self.release = tuple(int(part) for part in version.split(".")[:2])
        self.trials: dict[int, Trial] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.storages: list[Any] = []
        self.acks: list[str] = []
        self.alerts: list[Any] = []
        self.experiments: dict[str, dict[str, Any]] = {}
        self.externals: dict[str, int] = {}
        self.preempting: set[str] = set()
        self.tokens: dict[str, str] = {}
        self.seen: list[Asked] = []
        """The requests whose token was good, in order."""
        self.lock = threading.RLock()
        self.signalled = threading.Condition(self.lock)
        self._closing = False
        self._sockets: set[socket.socket] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    # for tests

    def add_trial(self, *, lengths: tuple[int, ...] = (10,), config: Mapping[str, Any] | None = None) -> Trial:
        """Add a trial whose searcher wants these lengths, one after the other."""
        made = Trial(len(self.trials) + 1, list(lengths), dict(config or {}))
        made.config.setdefault("searcher", {"name": "single", "metric": "loss", "max_length": {"batches": lengths[-1]}})
        self.trials[made.trial_id] = made
        return made

    def start(self, trial: Trial, folder: Path, *, latest: str | None = None) -> dict[str, str]:
        """Begin an allocation: writes the information files; returns the variables of its processes."""
        trial.run_id += 1
        folder.mkdir(parents=True, exist_ok=True)
        token = f"token-{trial.allocation_id}"
        self.tokens[token] = trial.allocation_id
        steps = self.checkpoints[latest]["metadata"]["steps_completed"] if latest in self.checkpoints else 0
        cluster = {
            "master_url": self.url, "cluster_id": "the-cluster", "agent_id": "agent-1", "slot_ids": [],
            "task_id": trial.task_id, "allocation_id": trial.allocation_id, "session_token": "ignored",
            "task_type": "TRIAL", "latest_checkpoint": latest,
        }  # fmt: skip
        about = {
            "trial_id": trial.trial_id, "experiment_id": 1, "trial_seed": 7, "hparams": {"lr": 0.5},
            "config": trial.config, "steps_completed": steps, "trial_run_id": trial.run_id, "debug": False,
            "inter_node_network_interface": None,
        }  # fmt: skip
        (folder / "cluster.json").write_text(json.dumps(cluster))
        (folder / "trial.json").write_text(json.dumps(about))
        secret = {"DET_USER_TOKEN": "users"} if self.release < (0, 37) else {"DET_SESSION_TOKEN": token}
        return {"DET_CORE_INFO_DIR": str(folder), "DET_USER": "someone", **secret}

    def preempt(self, trial: Trial) -> None:
        """Ask the trial's allocation to stop."""
        with self.lock:
            self.preempting.add(trial.allocation_id)
            self.signalled.notify_all()

    def end(self, trial: Trial) -> None:
        """End the trial's allocation, which makes its token invalid."""
        with self.lock:
            self.tokens = {t: a for t, a in self.tokens.items() if a != trial.allocation_id}

    def close(self) -> None:
        """Stop, and drop every connection."""
        with self.lock:
            self._closing = True
            self.signalled.notify_all()
        self._server.shutdown()
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    # requests

    def answer(self, asked: Asked, token: str | None) -> Any:
        """Return the answer: JSON, or a list of lines."""
        for method, pattern, name in ROUTES:
            match = re.fullmatch(pattern, asked.path)
            if match and method == asked.method and not (name in OPERATIONS and self.release >= (0, 38)):
                if name != "master":
                    self._admit(token, asked)
                self.seen.append(asked)
                return getattr(self, f"on_{name}")(asked, *map(unquote, match.groups()))
        raise Refused(12, "Not Implemented")

    def _admit(self, token: str | None, asked: Asked) -> None:
        if token is None:
            raise Refused(16, "token missing")
        known = asked.allocation and token in self.tokens and self.release >= (0, 37)
        if not known and not (token == "users" and not asked.allocation):
            raise Refused(16, "invalid credentials")

    def _trial(self, text: str) -> Trial:
        if int(text) not in self.trials:
            raise Refused(5, f"trial {text} not found")
        return self.trials[int(text)]

    def on_master(self, asked: Asked) -> Any:
        names = ("clusterName", "masterId")
        return {"version": self.version, "clusterId": self.cluster_id, **dict.fromkeys(names, "x")}

    def on_run_start(self, asked: Asked) -> Any:
        self._trial(str(asked.body["runId"]))
        storage = asked.body.get("checkpointStorage")
        if storage is None:
            return {}
        if storage.get("type") not in ("shared_fs", "directory", "s3", "gcs", "azure"):
            raise Refused(3, "invalid checkpoint storage")
        if storage not in self.storages:
            self.storages.append(storage)
        return {"storageId": self.storages.index(storage) + 1}

    def on_metrics(self, asked: Asked, trial_id: str) -> Any:
        trial, said = self._trial(trial_id), asked.body["metrics"]
        group, steps, values = asked.body["group"], said.get("stepsCompleted"), said["metrics"]
        avg, batches = values["avgMetrics"], values.get("batchMetrics")
        if not group or "." in group:
            raise Refused(3, "invalid metric group")
        if said["trialRunId"] != trial.run_id:
            raise Refused(2, f"invalid run id, {said['trialRunId']} != {trial.run_id}")
        if isinstance(avg.get("epoch"), str):
            raise Refused(3, "metric 'epoch' is not a number")
        row = {"group": group, "steps": steps, "run": trial.run_id, "avg": avg, "batches": batches, "hidden": False}
        row["time"] = said.get("reportTime") or "2026-01-01T00:00:00Z"
        if group in SYSTEM:
            trial.rows.append(row)
            return {}
        for old in trial.rows:
            if old["run"] < trial.run_id and old["group"] not in SYSTEM and None not in (old["steps"], steps):
                old["hidden"] |= old["steps"] >= steps if old["group"] == group else old["steps"] > steps
        same = [r for r in trial.rows if (r["group"], r["steps"], r["run"]) == (group, steps, trial.run_id)]
        if same:
            merged = same[0]["avg"]
            if any(key in merged and merged[key] != value for key, value in avg.items()):
                raise Refused(2, "overwriting existing metric keys is not supported")
            if batches is not None and same[0]["batches"] is not None:
                raise Refused(2, "overwriting batch metrics is not supported")
            merged.update(avg)
            same[0]["batches"] = same[0]["batches"] or batches
        else:
            trial.rows.append(row)
        return {}

    def on_progress(self, asked: Asked, trial_id: str) -> Any:
        is_number = isinstance(asked.body, (int, float))
        if is_number != (self.release < (0, 37)) or not (is_number or "progress" in asked.body):
            raise Refused(3, "json: cannot unmarshal progress")
        self._trial(trial_id).progress.append(asked.body)
        return {}

    def on_status(self, asked: Asked, trial_id: str) -> Any:
        self._trial(trial_id).states.append(asked.body["state"])
        return {}

    def on_set_metadata(self, asked: Asked, trial_id: str) -> Any:
        self._trial(trial_id).metadata = asked.body["metadata"]
        return {"metadata": asked.body["metadata"]}

    def on_get_metadata(self, asked: Asked, trial_id: str) -> Any:
        return {"metadata": self._trial(trial_id).metadata}

    def on_trial(self, asked: Asked, trial_id: str) -> Any:
        trial = self._trial(trial_id)
        steps = [r["steps"] for r in trial.rows if r["group"] == "validation"]
        return {"trial": {"id": trial.trial_id, "latestValidation": {"totalBatches": max(steps)} if steps else None}}

    def on_early_exit(self, asked: Asked, trial_id: str) -> Any:
        if asked.body["reason"] not in ("EXITED_REASON_INVALID_HP", "EXITED_REASON_INIT_INVALID_HP"):
            raise Refused(3, "unknown exit reason")
        self._trial(trial_id).exits.append(asked.body["reason"])
        return {}

    def on_best(self, asked: Asked, experiment_id: str) -> Any:
        rows = [r for t in self.trials.values() for r in t.rows if r["group"] == "validation" and not r["hidden"]]
        values = [r["avg"]["loss"] for r in rows if "loss" in r["avg"]]
        if not values:
            raise Refused(5, "no validations for experiment")
        return {"metric": min(values)}

    def on_operation(self, asked: Asked, trial_id: str) -> Any:
        trial = self._trial(trial_id)
        over = trial.done >= len(trial.lengths)
        length = trial.lengths[min(trial.done, len(trial.lengths) - 1)]
        op = {"validateAfter": {"requestId": trial.task_id.partition(".")[2], "length": str(length)}}
        return {"op": op, "completed": over}

    def on_complete(self, asked: Asked, trial_id: str) -> Any:
        trial, length = self._trial(trial_id), int(asked.body["op"]["length"])
        if trial.done >= len(trial.lengths) or length != trial.lengths[trial.done]:
            raise Refused(2, f"op {length} is not the current op, or is completed already")
        if not isinstance(asked.body["searcherMetric"], (int, float)):
            raise Refused(2, "searcher metric is not a float")
        trial.done += 1
        trial.completed.append((length, asked.body["searcherMetric"]))
        return {}

    def on_checkpoint(self, asked: Asked) -> Any:
        said = asked.body
        if said.get("state") not in ("STATE_COMPLETED", "STATE_UNSPECIFIED"):
            raise Refused(3, "checkpoints are reported when they are complete")
        if said["taskId"] not in [t.task_id for t in self.trials.values()]:
            raise Refused(2, "only trials report checkpoints")
        if said["uuid"] in self.checkpoints:
            raise Refused(2, "duplicate key value violates unique constraint")
        if not all(isinstance(size, str) for size in said["resources"].values()):
            raise Refused(3, "resources: sizes are int64 strings")
        self.checkpoints[said["uuid"]] = {**said, "rows": {t.trial_id: len(t.rows) for t in self.trials.values()}}
        return {}

    def on_get_checkpoint(self, asked: Asked, uuid: str) -> Any:
        if uuid not in self.checkpoints:
            raise Refused(5, f"checkpoint {uuid} not found")
        found = self.checkpoints[uuid]
        return {"checkpoint": {k: found[k] for k in ("uuid", "metadata", "resources", "state", "training")}}

    def on_patch_checkpoints(self, asked: Asked) -> Any:
        for patch in asked.body["checkpoints"]:
            if patch["uuid"] not in self.checkpoints:
                raise Refused(5, f"checkpoint {patch['uuid']} not found")
            found, left = self.checkpoints[patch["uuid"]], patch["resources"]["resources"]
            if left != found["resources"]:
                found["state"] = "STATE_PARTIALLY_DELETED" if left else "STATE_DELETED"
            found["resources"] = left
        return {}

    def on_preemption(self, asked: Asked, allocation_id: str) -> Any:
        with self.lock:
            wait = float(asked.query.get("timeout_seconds", 60))
            self.signalled.wait_for(lambda: allocation_id in self.preempting or self._closing, wait)
            return {"preempt": allocation_id in self.preempting}

    def on_ack(self, asked: Asked, allocation_id: str) -> Any:
        self.acks.append(allocation_id)
        return {}

    def on_alert(self, asked: Asked) -> Any:
        self.alerts.append(asked.body)
        return {}

    def on_read_metrics(self, asked: Asked) -> Any:
        trial = self._trial(asked.query["trialIds"])
        rows = [
            {
                "trialId": trial.trial_id, "trialRunId": r["run"], "group": r["group"], "endTime": r["time"],
                "totalBatches": r["steps"] or 0, "metrics": {"avg_metrics": r["avg"]}, "archived": r["hidden"],
            }
            for r in trial.rows
            if r["group"] == asked.query["group"]
        ]  # fmt: skip
        return [{"result": {"metrics": [row]}} for row in rows]

    # unmanaged (§9)

    def on_put_experiment(self, asked: Asked, external: str) -> Any:
        if not asked.body.get("unmanaged") or not isinstance(asked.body["config"], str):
            raise Refused(3, "an unmanaged experiment needs its config as text")
        number = len(self.experiments) + 11
        found = self.experiments.setdefault(external, {"id": number, "config": asked.body["config"]})
        return {"experiment": {"id": found["id"]}, "config": {}}

    def on_put_trial(self, asked: Asked) -> Any:
        external, made = asked.body["externalTrialId"], asked.body["createTrialRequest"]
        if external not in self.externals:
            trial = Trial(len(self.trials) + 1, [1], {})
            trial.task_id = f"{made['experimentId']}.{external}"
            self.trials[trial.trial_id] = trial
            self.externals[external] = trial.trial_id
        trial = self.trials[self.externals[external]]
        ids = {"id": trial.trial_id, "experimentId": made["experimentId"], "taskId": trial.task_id}
        return {"trial": {**ids, "restarts": 0, "state": "STATE_RUNNING", "totalBatchesProcessed": 0}}

    def on_start_trial(self, asked: Asked, trial_id: str) -> Any:
        trial = self._trial(trial_id)
        if trial.run_id and not asked.body.get("resume"):
            raise Refused(2, "trial was started before")
        trial.run_id += 1
        return {"trialRunId": trial.run_id, "stepsCompleted": 0, "latestCheckpoint": None}

    def on_patch_trial(self, asked: Asked, trial_id: str) -> Any:
        trial = self._trial(trial_id)
        trial.unmanaged_state = asked.body.get("state", trial.unmanaged_state)
        return {"trial": {"id": trial.trial_id}}


OPERATIONS = ("operation", "complete")
ROUTES = [
    ("GET", "/api/v1/master", "master"),
    ("POST", "/api/v1/runs/start", "run_start"),
    ("POST", r"/api/v1/trials/(\d+)/metrics", "metrics"),
    ("POST", r"/api/v1/trials/(\d+)/progress", "progress"),
    ("POST", r"/api/v1/trials/(\d+)/runner/metadata", "status"),
    ("POST", r"/api/v1/runs/(\d+)/metadata", "set_metadata"),
    ("GET", r"/api/v1/runs/(\d+)/metadata", "get_metadata"),
    ("GET", r"/api/v1/trials/(\d+)", "trial"),
    ("POST", r"/api/v1/trials/(\d+)/early_exit", "early_exit"),
    ("GET", r"/api/v1/experiments/(\d+)/searcher/best_searcher_validation_metric", "best"),
    ("GET", r"/api/v1/trials/(\d+)/searcher/operation", "operation"),
    ("POST", r"/api/v1/trials/(\d+)/searcher/completed_operation", "complete"),
    ("POST", "/api/v1/checkpoints", "checkpoint"),
    ("GET", "/api/v1/checkpoints/([^/]+)", "get_checkpoint"),
    ("PATCH", "/api/v1/checkpoints", "patch_checkpoints"),
    ("GET", "/api/v1/allocations/([^/]+)/signals/preemption", "preemption"),
    ("POST", "/api/v1/allocations/([^/]+)/signals/ack_preemption", "ack"),
    ("POST", "/api/v1/webhooks/custom", "alert"),
    ("GET", "/api/v1/trials/metrics/trial_metrics", "read_metrics"),
    ("PUT", "/api/v1/experiments/by-external-id/([^/]+)", "put_experiment"),
    ("PUT", "/api/v1/trials", "put_trial"),
    ("POST", r"/api/v1/trials/(\d+)/start", "start_trial"),
    ("PATCH", r"/api/v1/trials/(\d+)", "patch_trial"),
]


def _handler(master: ForeignMaster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            master._sockets.add(self.connection)

        def finish(self) -> None:
            master._sockets.discard(self.connection)
            with suppress(OSError):
                super().finish()

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

        def log_message(self, *args: Any) -> None:
            pass

        def _do(self) -> None:
            url = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            bearer = self.headers.get("Grpc-Metadata-x-allocation-token")
            shown = bearer or self.headers.get("Authorization")
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            try:
                body = json.loads(data) if data else {}
                asked = Asked(self.command, url.path, query, body, bearer is not None)
                if asked.path.endswith("preemption"):  # waits, and locks by itself
                    found = master.answer(asked, shown and shown.removeprefix("Bearer "))
                else:
                    with master.lock:
                        found = master.answer(asked, shown and shown.removeprefix("Bearer "))
                status = 200
            except Refused as e:
                status, reason = NAMES[e.code]
                found = {"error": {"code": e.code, "reason": reason, "error": str(e)}}
            except (ValueError, KeyError, TypeError) as e:
                status, found = 400, {"error": {"code": 3, "reason": "InvalidArgument", "error": repr(e)}}
            text = "\n".join(map(json.dumps, found)) if isinstance(found, list) else json.dumps(found)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _do

    return Handler


@contextmanager
def foreign_master(version: str) -> Iterator[ForeignMaster]:
    """Yield a master of that release."""
    master = ForeignMaster(version)
    try:
        yield master
    finally:
        master.close()
