"""Reach of a trial's token, on every route there is, and its lifetime."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import until
from support.real_master import ALLOCATION, BEARER, Allocation, RealMaster
from support.recipe import Held

SINGLE = {"name": "single", "max_length": 8}
OPEN, MINE, USER = "everybody", "its own", "the user alone"
"""Callers a route admits: everybody without a token; a trial, of its own objects; nobody but the user."""
E, T, A = "/api/v1/experiments/{experiment_id}", "/api/v1/trials/{trial_id}", "/api/v1/allocations/{allocation_id}"
ROUTES: dict[tuple[str, str], str] = {
    ("GET", "/info"): OPEN,
    ("GET", "/api/v1/master"): OPEN,
    ("GET", "/api/v1/master/telemetry"): OPEN,
    ("POST", "/api/v1/auth/login"): OPEN,
    **{("POST", f"{T}/{name}"): MINE for name in ("metrics", "training_metrics", "validation_metrics", "progress")},
    **{("POST", f"{T}/{name}"): MINE for name in ("runner/metadata", "early_exit", "searcher/completed_operation")},
    **{("GET", f"{T}{name}"): MINE for name in ("", "/logs", "/checkpoints", "/searcher/operation")},
    **{("GET", f"/api/v1/trials/metrics/{name}_metrics"): MINE for name in ("trial", "training", "validation")},
    ("POST", "/api/v1/journal"): MINE,
    ("POST", "/api/v1/runs/start"): MINE,
    ("GET", "/api/v1/runs/{trial_id}/metadata"): MINE,
    ("POST", "/api/v1/runs/{trial_id}/metadata"): MINE,
    ("POST", "/api/v1/checkpoints"): MINE,
    ("PATCH", "/api/v1/checkpoints"): MINE,
    ("GET", "/api/v1/checkpoints/{uuid}"): MINE,
    ("POST", "/api/v1/webhooks/custom"): MINE,
    ("POST", "/api/v1/trial-source-info"): MINE,
    ("GET", "/api/v1/tasks/{task_id}/context_directory"): MINE,
    ("GET", "/api/v1/tasks/{task_id}/logs"): MINE,
    ("POST", "/api/v1/task/logs"): MINE,
    ("POST", "/task-logs"): MINE,
    ("GET", f"{A}/signals/preemption"): MINE,
    ("GET", A + "/resources/{resources_id}/rendezvous"): MINE,
    ("POST", A + "/resources/{resources_id}/daemon"): MINE,
    **{("POST", f"{A}/signals/{name}_preemption"): MINE for name in ("ack", "pending")},
    **{("POST", f"{A}/{name}"): MINE for name in ("all_gather", "notify_container_running", "acceleratorData")},
    **{("POST", f"{A}/{name}"): MINE for name in ("proxy_address", "ready", "waiting")},
    **{("GET", f"{E}{name}"): MINE for name in ("", "/trials", "/checkpoints", "/wait", "/search", "/model_def")},
    **{("GET", f"{E}/{name}"): MINE for name in ("best_trial", "best_checkpoint", "logs")},
    ("GET", f"{E}/searcher/best_searcher_validation_metric"): MINE,
    ("GET", "/api/v1/experiments"): USER,
    ("POST", "/api/v1/experiments"): USER,
    ("POST", "/api/v1/experiments/continue"): USER,
    ("PUT", "/api/v1/experiments/by-external-id/{external_id}"): USER,
    ("PATCH", E): USER,
    ("DELETE", E): USER,
    **{("POST", f"{E}/{name}"): USER for name in ("activate", "pause", "cancel", "kill")},
    ("POST", f"{T}/kill"): USER,
    ("POST", f"{T}/start"): USER,
    ("PATCH", T): USER,
    ("POST", "/api/v1/trials"): USER,
    ("PUT", "/api/v1/trials"): USER,
    ("DELETE", "/api/v1/checkpoints"): USER,
    ("POST", "/api/v1/checkpoints/rm"): USER,
    ("POST", "/api/v1/checkpoints/{uuid}/metadata"): USER,
}
LAST = [("POST", f"{T}/searcher/completed_operation"), ("POST", f"{A}/signals/pending_preemption")]
"""Routes that change the answers of the others: asked after them. The last one is the early exit."""


def body(route: tuple[str, str], of: Allocation, kept: str) -> Any:
    """Return a valid body for a route, about objects of an allocation."""
    values = {"avgMetrics": {"loss": 1.0}, "batchMetrics": None}
    report = {"trialId": of.trial_id, "trialRunId": of.run_id, "stepsCompleted": 1, "metrics": values}
    record = {"kind": "metrics", "seq": 1, "time": 1.7e9, "group": "g", "steps_completed": 1, "metrics": {"x": 1}}
    line = {"task_id": of.task_id, "log": "x\n"}
    metadata = {"steps_completed": 1}
    return {
        f"{T}/metrics": {"group": "other", "metrics": report},
        f"{T}/training_metrics": report,
        f"{T}/validation_metrics": report,
        f"{T}/progress": 1.5,
        f"{T}/runner/metadata": {"state": "x"},
        f"{T}/early_exit": {"reason": "EXITED_REASON_INVALID_HP"},
        f"{T}/searcher/completed_operation": {"op": {"length": 8}, "searcherMetric": 1.0},
        f"{T}/start": {"trialId": of.trial_id, "resume": True},
        T: {"trialId": of.trial_id},
        "/api/v1/journal": {"trialId": of.trial_id, "trialRunId": of.run_id, "rank": 0, "records": [record]},
        "/api/v1/runs/start": {"runId": of.trial_id, "checkpointStorage": None},
        "/api/v1/runs/{trial_id}/metadata": {"metadata": {"x": 1}, "runId": of.trial_id},
        "/api/v1/checkpoints": {
            "POST": {"uuid": str(uuid.uuid4()), "taskId": of.task_id, "metadata": metadata, "resources": {}},
            "PATCH": {"checkpoints": [{"uuid": kept, "resources": {"resources": {"a": "1"}}}]},
            "DELETE": {"checkpointUuids": [kept]},
        }.get(route[0]),
        "/api/v1/checkpoints/rm": {"checkpointUuids": [kept], "checkpointGlobs": ["**/*"]},
        "/api/v1/checkpoints/{uuid}/metadata": {"checkpoint": {"metadata": metadata}},
        "/api/v1/webhooks/custom": {"data": {}, "experimentId": of.experiment_id, "trialId": of.trial_id},
        "/api/v1/trial-source-info": {"trialSourceInfo": {"checkpointUuid": kept, "trialId": of.trial_id}},
        "/api/v1/task/logs": {"logs": [line]},
        "/task-logs": [line],
        f"{A}/all_gather": {"requestUuid": "u", "numPeers": 1, "data": {}},
        f"{A}/notify_container_running": {"requestUuid": "u", "numPeers": 1, "data": {}},
        f"{A}/acceleratorData": {"acceleratorData": {}},
        f"{A}/proxy_address": {"proxyAddress": "127.0.0.1"},
        f"{A}/ready": {},
        f"{A}/waiting": {},
        E: {"name": "x"},
        "/api/v1/experiments": {"config": "{}"},
        "/api/v1/experiments/continue": {"id": of.experiment_id},
        "/api/v1/experiments/by-external-id/{external_id}": {"config": "{}", "unmanaged": True},
        "/api/v1/trials": {
            "POST": {"experimentId": of.experiment_id, "hparams": {}, "unmanaged": True},
            "PUT": {"createTrialRequest": {"experimentId": of.experiment_id}, "externalTrialId": "x"},
        }.get(route[0]),
        "/api/v1/auth/login": {"username": "x", "password": "x"},
    }.get(route[1])


def address(route: tuple[str, str], of: Allocation, kept: str) -> str:
    """Return the address of a route, for objects of an allocation; nothing waits."""
    path = route[1].format(
        trial_id=of.trial_id,
        experiment_id=of.experiment_id,
        allocation_id=of.id,
        task_id=of.task_id,
        uuid=kept,
        resources_id="r",
        external_id="x",
    )
    query = {f"{A}/signals/preemption": "?timeout_seconds=0", f"{E}/wait": "?timeout_seconds=0"}.get(route[1], "")
    return path + (f"?trialIds={of.trial_id}" if "/trials/metrics/" in path else query)


class Two:
    """Two trials of different experiments, each with a checkpoint and a validation."""

    def __init__(self, real: RealMaster, folder: Path) -> None:
        self.real, self.held = real, [Held(real, folder, SINGLE), Held(real, folder, SINGLE)]
        self.one, self.other = (held.allocation() for held in self.held)
        self.kept: dict[str, str] = {}
        for of in (self.one, self.other):
            name = self.kept[of.id] = str(uuid.uuid4())
            metadata = {"steps_completed": 1}
            made = {"uuid": name, "taskId": of.task_id, "metadata": metadata, "resources": {"a": "1"}}
            real.post("checkpoints", made, token=of.token)
            real.post(f"trials/{of.trial_id}/metrics", self._validation(of), token=of.token)

    @staticmethod
    def _validation(of: Allocation) -> dict[str, Any]:
        values = {"avgMetrics": {"loss": 1.0}}
        told = {"trialId": of.trial_id, "trialRunId": of.run_id, "stepsCompleted": 1, "metrics": values}
        return {"group": "validation", "metrics": told}

    def ask(self, route: tuple[str, str], of: Allocation, token: str | None, header: str = BEARER) -> int:
        """Return the status of a valid request about objects of an allocation, with a token."""
        kept = self.kept[of.id]
        path, sent = address(route, of, kept), body(route, of, kept)
        return self.real.ask(route[0], path, sent, token=token, header=header).status_code


@pytest.fixture
def two(real: RealMaster, tmp_path: Path) -> Iterator[Two]:
    """Yield two trials that run."""
    found = Two(real, tmp_path)
    yield found
    for held in found.held:
        if "endTime" not in real.get(f"experiments/{held.id}")["experiment"]:
            held.end()


def known(real: RealMaster) -> list[tuple[str, str]]:
    """Return all routes that the API describes."""
    paths = real.get("/openapi.json", token=None)["paths"]
    return [(method.upper(), path) for path, operations in paths.items() for method in operations]


def test_it_reaches_its_own_trial_and_no_other(two: Two) -> None:
    routes = known(two.real)
    assert set(routes) == {*ROUTES, ("GET", "/api/v1/me")}, "a route is new or gone: say here who may"
    early = ("POST", f"{T}/early_exit")
    ordered = sorted(ROUTES, key=lambda route: (route == early, route in LAST))
    wrong = []
    for route in ordered:
        who, header = ROUTES[route], ALLOCATION if len(route[1]) % 2 else BEARER
        found = [
            two.ask(route, two.other, None),
            two.ask(route, two.other, "x" * 43, header),
            two.ask(route, two.other, two.one.token, header),
            two.ask(route, two.one, two.one.token, header),
        ]
        closed = [401, 401, 403]
        login = [401] * 4 if route[1].endswith("login") else [200] * 4
        wanted = login if who == OPEN else [*closed, 200] if who == MINE else [*closed, 403]
        if found != wanted:
            wrong.append((*route, who, found, wanted))
    assert not wrong, "\n".join(map(str, wrong))
    assert two.real.ask("GET", "me").status_code == 200
    for header in (ALLOCATION, BEARER):
        assert two.real.ask("GET", "me", token=two.one.token, header=header).status_code == 200
    _check_untouched(two)


def _check_untouched(two: Two) -> None:
    """Check that the other trial is unchanged."""
    trial = two.real.get(f"trials/{two.other.trial_id}")["trial"]
    assert (trial["state"], trial["runnerState"], trial["operationCompleted"]) == ("STATE_RUNNING", "", False)
    assert two.real.rows(two.other.trial_id, "training", archived="true") == []
    assert two.real.get(f"runs/{two.other.trial_id}/metadata") == {"metadata": {}}
    (kept,) = two.real.get(f"trials/{two.other.trial_id}/checkpoints")["checkpoints"]
    assert (kept["state"], kept["resources"]) == ("STATE_COMPLETED", {"a": "1"})
    assert "x\n" not in [line["log"] for line in two.real.logs(two.other.trial_id)]
    assert two.real.get(f"experiments/{two.other.experiment_id}")["experiment"]["name"] == "recipe"


def test_a_body_that_names_another_is_seen(two: Two) -> None:
    """Reject a body that names another trial than the address allows."""
    one, other = two.one, two.other
    mine = [two.kept[one.id], two.kept[other.id]]
    line = {"log": "x\n", "task_id": one.task_id}
    tries: list[tuple[str, str, Any]] = [
        ("GET", f"trials/metrics/trial_metrics?trialIds={one.trial_id}&trialIds={other.trial_id}", None),
        ("PATCH", "checkpoints", {"checkpoints": [{"uuid": u, "resources": {"resources": {}}} for u in mine]}),
        ("POST", "task/logs", {"logs": [line, {**line, "task_id": other.task_id}]}),
        ("POST", "task/logs", {"logs": [{**line, "allocation_id": other.id}]}),
        ("POST", "/task-logs", [line, {**line, "task_id": other.task_id}]),
        ("POST", "webhooks/custom", {"experimentId": one.experiment_id, "trialId": other.trial_id}),
        ("POST", "webhooks/custom", {"experimentId": other.experiment_id}),
        (
            "POST",
            "checkpoints",
            {"uuid": "u", "taskId": one.task_id, "allocationId": other.id, "metadata": {"steps_completed": 1}},
        ),
    ]
    for method, path, sent in tries:
        assert two.real.ask(method, path, sent, token=one.token).status_code == 403, (path, sent)
    report = {**Two._validation(other)}
    answer = two.real.ask("POST", f"trials/{one.trial_id}/metrics", report, token=one.token)
    assert answer.status_code == 400, "the address and the body name different trials"
    assert two.real.get(f"checkpoints/{mine[0]}")["checkpoint"]["state"] == "STATE_COMPLETED"
    _check_untouched(two)


def test_it_dies_with_its_process_and_not_before(two: Two) -> None:
    one = two.one
    two.real.post(f"experiments/{one.experiment_id}/pause")
    assert two.real.get(f"allocations/{one.id}/signals/preemption?timeout_seconds=30", token=one.token)["preempt"]
    two.real.post(f"allocations/{one.id}/signals/ack_preemption", token=one.token)
    assert two.real.ask("GET", "me", token=one.token).status_code == 200, "it is asked to stop, and still lives"
    two.held[0].exit(one)
    until(lambda: two.real.ask("GET", "me", token=one.token).status_code == 401)
    assert two.real.get(f"trials/{one.trial_id}")["trial"]["state"] == "STATE_PAUSED"
    two.real.post(f"experiments/{one.experiment_id}/activate")
    new = two.held[0].allocation(run_id=2)
    assert new.token != one.token and two.real.ask("GET", "me", token=new.token).status_code == 200
    assert two.real.ask("GET", "me", token=one.token).status_code == 401
    two.held[0].end()
    until(lambda: two.real.ask("GET", "me", token=new.token).status_code == 401)
