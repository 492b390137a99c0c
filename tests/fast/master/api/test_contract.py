"""Calls of the contract's clients, in their order, with nothing but requests (§3.4, §4, §5)."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any
from urllib.parse import quote

import pytest

from support.running_master import Running

CHECKPOINT_KEYS = {"metadata", "resources", "state", "training", "uuid"}
TRIAL_KEYS = {"experimentId", "hparams", "id", "restarts", "startTime", "state", "totalBatchesProcessed", "taskId"}
EXPERIMENT_KEYS = {
    *("archived", "config", "id", "jobId", "name", "numTrials", "originalConfig", "projectId", "projectOwnerId"),
    *("searcherType", "startTime", "state", "username"),
}
MASTER_KEYS = {"clusterId", "clusterName", "hasCustomLogo", "masterId", "strictJobQueueControl", "version"}


def report(master: Running, spec: Any, group: str, step: int | None, metrics: dict[str, Any], **more: Any) -> Any:
    """Send one report, as a client of either generation does."""
    body = {
        "group": group,
        "metrics": {
            "trialId": spec.trial_id,
            "trialRunId": spec.trial_run_id,
            "stepsCompleted": step,
            "reportTime": None,
            "metrics": {"avgMetrics": metrics, "batchMetrics": None},
            **more,
        },
    }
    return master.ask("POST", f"trials/{spec.trial_id}/metrics", body, spec.session_token)


def checkpoint(spec: Any, step: int) -> dict[str, Any]:
    """Return a report of a checkpoint, as §5.7 shows it."""
    return {
        "uuid": str(uuid.uuid4()),
        "taskId": spec.task_id,
        "allocationId": spec.allocation_id,
        "storageId": None,
        "metadata": {"steps_completed": step, "mine": [1, None]},
        "resources": {"sub/": "0", "sub/f": "2", "metadata.json": 26},
        "state": "STATE_COMPLETED",
        "training": {},
        "reportTime": "2024-01-01T00:00:00.000000+00:00",
    }


def test_a_trial_of_the_older_generation_from_its_start_to_its_end(master: Running) -> None:
    spec = master.a_trial()
    trial, allocation, token = f"trials/{spec.trial_id}", f"allocations/{spec.allocation_id}", spec.session_token
    storage = {"type": "shared_fs", "host_path": "/tmp"}
    started = master.ask("POST", "runs/start", {"runId": spec.trial_id, "checkpointStorage": storage}, token)
    again = master.ask("POST", "runs/start", {"runId": spec.trial_id, "checkpointStorage": dict(storage)}, token)
    assert started.status == 200
    assert type(started.json["storageId"]) is int
    assert again.json == started.json
    assert master.ask("POST", "runs/start", {"runId": spec.trial_id, "checkpointStorage": None}, token).json == {}
    assert master.ask("GET", f"{allocation}/signals/preemption?timeout_seconds=0", None, token).json == {
        "preempt": False
    }

    op = master.ask("GET", f"{trial}/searcher/operation", None, token).json
    assert op["completed"] is False
    assert op["op"]["validateAfter"]["length"] == "10"
    assert report(master, spec, "training", 10, {"loss": 0.5}).json == {}
    assert report(master, spec, "validation", 10, {"loss": 0.25, "bad": "NaN"}).json == {}
    assert report(master, spec, "gpu", None, {"agent": {"u": 1}}, reportTime="2024-01-01T00:00:00Z").json == {}
    for progress in (1.5, {"progress": 1.5}, {"progress": 0.25, "is_raw": True}, {"progress": "0.5", "isRaw": True}):
        assert master.ask("POST", f"{trial}/progress", progress, token).json == {}
    assert master.ask("POST", f"{trial}/runner/metadata", {"state": "evaluating"}, token).json == {}
    kept = checkpoint(spec, 10)
    assert master.ask("POST", "checkpoints", kept, token).json == {}
    found = master.ask("GET", f"checkpoints/{kept['uuid']}", None, token).json["checkpoint"]
    assert set(found) >= CHECKPOINT_KEYS
    assert found["resources"] == {"sub/": "0", "sub/f": "2", "metadata.json": "26"}
    assert found["metadata"] == {"steps_completed": 10, "mine": [1, None]}
    assert found["state"] == "STATE_COMPLETED"
    assert found["training"]["validationMetrics"]["avgMetrics"]["loss"] == 0.25
    best = master.ask("GET", f"experiments/{spec.experiment_id}/searcher/best_searcher_validation_metric", None, token)
    assert best.json == {"metric": 0.25}
    told = master.ask("GET", trial, None, token).json["trial"]
    assert set(told) >= TRIAL_KEYS
    assert told["latestValidation"]["totalBatches"] == 10
    assert told["runnerState"] == "evaluating"

    done = {"op": {"length": "10"}, "searcherMetric": 0.25}
    assert master.ask("POST", f"{trial}/searcher/completed_operation", done, token).json == {}
    assert master.ask("POST", f"{trial}/searcher/completed_operation", done, token).json == {}
    assert master.ask("GET", f"{trial}/searcher/operation", None, token).json["completed"] is True
    assert master.ask("POST", f"{allocation}/signals/ack_preemption", None, token).json == {}
    master.end(spec.allocation_id)
    experiment = master.until(spec.experiment_id, "STATE_COMPLETED")
    assert set(experiment) >= EXPERIMENT_KEYS
    assert experiment["numTrials"] == 1
    late = report(master, spec, "training", 11, {"loss": 0.1})
    assert late.status == 401, "the token of an allocation ends with it"


def test_a_trial_of_the_newer_generation_completes_by_its_exit(master: Running) -> None:
    spec = master.a_trial()
    progress = {"progress": 0.5, "is_raw": True}
    assert master.ask("POST", f"trials/{spec.trial_id}/progress", progress, spec.session_token).status == 200
    assert report(master, spec, "validation", 10, {"loss": 1.0}).status == 200
    master.end(spec.allocation_id)
    master.until(spec.experiment_id, "STATE_COMPLETED")


def test_a_metadata_set_is_what_is_read(master: Running) -> None:
    spec = master.a_trial()
    path, token = f"runs/{spec.trial_id}/metadata", spec.session_token
    assert master.ask("GET", path, None, token).json == {"metadata": {}}
    body = {"metadata": {"a": {"b": None}, "snake_case": 1.5}, "runId": spec.trial_id}
    assert master.ask("POST", path, body, token).json == {"metadata": body["metadata"]}
    assert master.ask("GET", path, None, token).json == {"metadata": body["metadata"]}


def test_no_validation_is_404_and_none_in_the_trial(master: Running) -> None:
    spec = master.a_trial()
    best = master.ask("GET", f"experiments/{spec.experiment_id}/searcher/best_searcher_validation_metric")
    assert (best.status, best.error["code"], best.error["reason"]) == (404, 5, "NotFound")
    assert master.ask("GET", f"trials/{spec.trial_id}").json["trial"].get("latestValidation") is None


def test_what_contradicts_what_is_recorded_is_a_conflict(master: Running) -> None:
    spec = master.a_trial()
    assert report(master, spec, "validation", 1, {"loss": 1.0}).status == 200
    assert report(master, spec, "validation", 1, {"loss": 1.0}).status == 200, "the same again"
    assert report(master, spec, "validation", 1, {"loss": 2.0}).status == 409
    kept = checkpoint(spec, 1)
    assert master.ask("POST", "checkpoints", kept, spec.session_token).status == 200
    assert master.ask("POST", "checkpoints", kept, spec.session_token).status == 200, "the same again"
    other = kept | {"resources": {"x": "1"}}
    assert master.ask("POST", "checkpoints", other, spec.session_token).status == 409
    for batch, status in ((1, 200), (2, 409), (1, 200)):
        values = {"avgMetrics": {"a": 1}, "batchMetrics": [{"x": batch}]}
        told = {"trialId": spec.trial_id, "trialRunId": 1, "stepsCompleted": 1, "metrics": values}
        body = {"group": "training", "metrics": told}
        assert master.ask("POST", f"trials/{spec.trial_id}/metrics", body, spec.session_token).status == status
    path = f"trials/{spec.trial_id}/searcher/completed_operation"
    for length, metric, status in ((3, 1.0, 409), (10, 1.0, 200), (10, 2.0, 409), (10, 1.0, 200)):
        done = {"op": {"length": length}, "searcherMetric": metric}
        assert master.ask("POST", path, done, spec.session_token).status == status


def test_the_journal_route_counts_each_record_once(master: Running) -> None:
    spec = master.a_trial()
    records = [
        {"kind": "metrics", "seq": i, "time": 1.7e9 + i, "group": "training", "steps_completed": i, "metrics": {"x": i}}
        for i in range(1, 6)
    ]
    body = {"trialId": spec.trial_id, "trialRunId": spec.trial_run_id, "rank": 0, "restart": 0, "records": records[:3]}
    assert master.ask("POST", "journal", body, spec.session_token).json == {"nextSeq": 4}
    body["records"] = records
    assert master.ask("POST", "journal", body, spec.session_token).json == {"nextSeq": 6}
    read = master.ask("GET", f"trials/metrics/trial_metrics?trialIds={spec.trial_id}&group=training")
    rows = [row for line in read.lines for row in line["metrics"]]
    assert [row["totalBatches"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["metrics"]["avgMetrics"] == {"x": 1}
    assert {"trialId", "endTime", "metrics", "totalBatches", "trialRunId", "id", "archived", "group"} <= set(rows[0])


def test_master_and_login_need_no_token(master: Running) -> None:
    said = master.ask("GET", "master", token=None).json
    assert set(said) >= MASTER_KEYS
    assert (said["software"], said["version"].split(".")[:2]) == ("det_core", ["0", "37"])
    assert "product" not in said, "an enum of the contract's clients"
    info = master.ask("GET", "/info", token=None).json
    assert set(info) >= {"version", "master_id", "cluster_id", "cluster_name", "telemetry", "sso_providers"}
    hashed = hashlib.sha512(("GubPEmmotfiK9TMD6Zdw" + master.token).encode()).hexdigest()
    body = {"username": "somebody", "password": hashed, "isHashed": True}
    login = master.ask("POST", "auth/login", body, token=None).json
    assert login["token"] == master.token
    assert {"username", "active", "admin"} <= set(login["user"])
    refused = master.ask("POST", "auth/login", {**body, "password": ""}, token=None)
    assert (refused.status, refused.error["code"]) == (401, 16)
    by_header = master.ask("GET", "me", token=None, headers={"Authorization": f"Bearer {login['token']}"})
    assert by_header.status == 200
    assert master.ask("GET", "me", token=None, cookies={"auth": login["token"]}).status == 401
    assert master.ask("GET", "me", token="x").error["error"] == "invalid credentials"
    assert master.ask("GET", "me", token=None).error["error"] == "token missing"


@pytest.mark.parametrize("external_id", ["a/b c", "of two\nlines", "\n", "\u009a\U000f25a8\n\u0092"])
def test_an_external_id_may_be_any_text(master: Running, external_id: str) -> None:
    body = {"config": "searcher: {name: single, metric: unmanaged, max_length: 100}", "unmanaged": True}
    path = f"experiments/by-external-id/{quote(external_id, safe='')}"
    created, again = master.ask("PUT", path, body), master.ask("PUT", path, body)
    assert created.status == 200 and created.json["experiment"]["id"] == again.json["experiment"]["id"]


def test_an_unmanaged_trial_from_its_start_to_its_end(master: Running) -> None:
    config = "name: mine\nsearcher: {name: single, metric: unmanaged, max_length: 100}\n"
    created = master.ask("PUT", "experiments/by-external-id/a%2Fb c", {"config": config, "unmanaged": True}).json
    again = master.ask("PUT", "experiments/by-external-id/a%2Fb c", {"config": config, "unmanaged": True}).json
    assert created["experiment"]["id"] == again["experiment"]["id"]
    wanted = {"experimentId": created["experiment"]["id"], "hparams": {"lr": 0.1}, "unmanaged": True}
    body = {"createTrialRequest": wanted, "externalTrialId": "T1"}
    trial = master.ask("PUT", "trials", body).json["trial"]
    assert master.ask("PUT", "trials", body).json["trial"]["id"] == trial["id"]
    assert set(trial) >= TRIAL_KEYS
    begun = master.ask("POST", f"trials/{trial['id']}/start", {"trialId": trial["id"], "resume": True}).json
    assert begun["trialRunId"] == 1
    assert begun["stepsCompleted"] == 0
    running = master.ask("PATCH", f"trials/{trial['id']}", {"trialId": trial["id"], "state": "STATE_RUNNING"})
    assert running.json["trial"]["state"] == "STATE_RUNNING"
    assert master.ask("PATCH", f"trials/{trial['id']}", {"trialId": trial["id"]}).status == 200
    lines = [{"task_id": trial["taskId"], "timestamp": "2024-01-01T00:00:00Z", "rank": "3", "log": "hello\n"}]
    assert master.ask("POST", "/task-logs", lines).json == {}
    log = master.ask("GET", f"trials/{trial['id']}/logs").lines
    assert [(line["log"], line["rankId"]) for line in log] == [("hello\n", 3)]
    ended = master.ask("PATCH", f"trials/{trial['id']}", {"state": "STATE_COMPLETED"})
    assert ended.json["trial"]["state"] == "STATE_COMPLETED"
    assert master.until(wanted["experimentId"], "STATE_COMPLETED")["unmanaged"] is True


def test_what_containers_of_an_allocation_agree_on(master: Running) -> None:
    spec = master.a_trial()
    path, token = f"allocations/{spec.allocation_id}", spec.session_token
    where = master.ask("GET", f"{path}/resources/r1/rendezvous", None, token).json["rendezvousInfo"]
    assert where["rank"] == 0
    assert len(where["addresses"]) == len(where["slots"]) == 1
    wanted = {"allocationId": spec.allocation_id, "requestUuid": "u1", "numPeers": 1, "data": {"rank": 0}}
    assert master.ask("POST", f"{path}/all_gather", wanted, token).json == {}
    assert master.ask("POST", f"{path}/notify_container_running", wanted | {"rank": 0}, token).json == {}
    accelerators = {"acceleratorData": {"containerId": "c", "acceleratorType": "cpu", "acceleratorUuids": []}}
    assert master.ask("POST", f"{path}/acceleratorData", accelerators, token).json == {}
    assert master.ask("POST", f"{path}/proxy_address", {"proxyAddress": "10.0.0.1"}, token).json == {}
    assert master.ask("POST", f"{path}/resources/r1/daemon", None, token).json == {}
    assert master.ask("POST", f"{path}/ready", {"allocationId": spec.allocation_id}, token).json == {}
    assert master.ask("POST", f"{path}/waiting", {"allocationId": spec.allocation_id}, token).json == {}


def test_experiments_are_listed_changed_paused_and_deleted(master: Running) -> None:
    experiment_id = master.created(activate=False)
    listed = master.ask("GET", "experiments?limit=1&orderBy=ORDER_BY_DESC").json["experiments"]
    assert [e["id"] for e in listed] == [experiment_id]
    assert listed[0]["state"] == "STATE_PAUSED"
    patch = {"name": "other", "resources": {"priority": 7}}
    patched = master.ask("PATCH", f"experiments/{experiment_id}", patch).json["experiment"]
    assert (patched["name"], patched["priority"]) == ("other", 7)
    listed = master.ask("GET", "experiments?name=other&states=STATE_PAUSED").json["experiments"]
    assert [e["id"] for e in listed] == [experiment_id]
    assert master.ask("POST", f"experiments/{experiment_id}/activate").json == {}
    (spec,) = master.launched(experiment_id)
    assert [t["id"] for t in master.ask("GET", f"experiments/{experiment_id}/trials").json["trials"]] == [spec.trial_id]
    assert master.ask("POST", f"experiments/{experiment_id}/kill").json == {}
    master.until(experiment_id, "STATE_CANCELED")
    waited = master.ask("GET", f"experiments/{experiment_id}/wait?timeout_seconds=30").json
    assert waited["experiment"]["state"] == "STATE_CANCELED"
    assert master.ask("DELETE", f"experiments/{experiment_id}").json == {}


def test_the_mistakes_of_a_configuration_come_one_a_line(master: Running) -> None:
    config = "entrypoint: 5\nsearcher: {name: rendom, metric: 3}\nmax_restarts: -1\n"
    refused = master.ask("POST", "experiments", {"config": config})
    assert refused.status == 400
    lines = refused.error["error"].splitlines()
    assert len(lines) >= 3
    assert any("max_restarts" in line for line in lines)
    assert any("entrypoint" in line for line in lines)


def test_a_search_that_is_asked_for_says_where_it_stands(master: Running) -> None:
    spec = master.a_trial()
    search = master.ask("GET", f"experiments/{spec.experiment_id}/search").json["search"]
    assert (search["experimentId"], search["trialsRequested"], search["searcher"]["name"]) == (
        spec.experiment_id,
        1,
        "single",
    )
    best = f"experiments/{spec.experiment_id}/best_"
    assert master.ask("GET", best + "trial").json == {}
    assert master.ask("GET", best + "checkpoint").json == {}
    report(master, spec, "validation", 3, {"loss": 0.125})
    kept = checkpoint(spec, 3)
    master.ask("POST", "checkpoints", kept, spec.session_token)
    trial = master.ask("GET", best + "trial").json["trial"]
    assert (trial["id"], trial["bestValidation"]["searcherMetric"]) == (spec.trial_id, 0.125)
    assert master.ask("GET", best + "checkpoint").json["checkpoint"]["uuid"] == kept["uuid"]
