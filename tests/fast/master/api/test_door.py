"""Checks that every request passes: tokens, limits, and the forms that a request may have."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from det_core.master.api._routing import MAX_OPEN_BODY_BYTES, Routes
from support.running_master import CONFIG, Running


def test_route_that_compares_no_object_with_the_token_cannot_be_declared() -> None:
    """Reject a route that would answer every trial; ``test_tokens.py`` proves the rights on every route."""

    async def forgetful(uuid: str) -> None:
        """Serve a route whose path names no object of a trial."""

    with pytest.raises(TypeError, match="names no object"):
        Routes("things").trial.get("/things/{uuid}")(forgetful)
    Routes("things").trial.get("/trials/{trial_id}/things/{uuid}")(forgetful)


def test_another_spelling_of_a_number_opens_nothing(master: Running) -> None:
    """Reject other spellings of an ID."""
    own, other = master.a_trial(), master.a_trial().trial_id
    for text in (f"%20{other}", f"+{other}", f"{other}.0", f"0{other}", f"{other}%20", "x", "-1"):
        assert master.ask("GET", f"trials/{text}", None, own.session_token).status == 403, text


def test_a_trial_may_read_the_checkpoint_that_it_starts_from(master: Running) -> None:
    first = master.a_trial()
    kept = {"uuid": "warm", "taskId": first.task_id, "metadata": {"steps_completed": 1}, "resources": {}}
    assert master.ask("POST", "checkpoints", kept, first.session_token).status == 200
    config = CONFIG.replace("max_length: 10", f"max_length: 10, source_trial_id: {first.trial_id}")
    second = master.a_trial(config)
    assert second.latest_checkpoint == "warm"
    found = master.ask("GET", "checkpoints/warm", None, second.session_token)
    assert found.json["checkpoint"]["metadata"] == {"steps_completed": 1}


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", "; ;", ""])
def test_a_body_is_json_whatever_its_content_type(master: Running, kind: str) -> None:
    spec = master.a_trial()
    headers = {"Content-Type": kind} if kind else {}
    answer = master.ask("POST", f"trials/{spec.trial_id}/runner/metadata", {"state": kind}, headers=headers)
    assert answer.json == {}
    assert master.ask("GET", f"trials/{spec.trial_id}").json["trial"]["runnerState"] == kind


def test_names_are_camel_or_snake_null_is_absent_and_more_is_ignored(master: Running) -> None:
    spec = master.a_trial()
    body = {"run_id": str(spec.trial_id), "checkpoint_storage": None, "what": {"ever": 1}}
    assert master.ask("POST", "runs/start", body).json == {}
    op = {"op": {"length": 10, "request_id": None}, "searcher_metric": "0.5x"}
    assert master.ask("POST", f"trials/{spec.trial_id}/searcher/completed_operation", op).status == 400
    metrics = {
        "group": "g",
        "metrics": {"trial_run_id": "1", "steps_completed": "4", "metrics": {"avg_metrics": {"some_key": 1}}},
    }
    assert master.ask("POST", f"trials/{spec.trial_id}/metrics", metrics).json == {}
    for names in ("trialIds={0}", "trial_ids={0}"):
        read = master.ask("GET", f"trials/metrics/trial_metrics?{names.format(spec.trial_id)}&group=g").lines
        assert read[0]["metrics"][0]["metrics"]["avgMetrics"] == {"some_key": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("trials/1/metrics", b"{"),
        ("trials/1/metrics", b"[]"),
        ("trials/1/metrics", b'{"group": 5}'),
        ("trials/1/metrics", b'{"group": "g", "metrics": {"trialRunId": 1, "metrics": {"avgMetrics": [1]}}}'),
        ("trials/1/metrics", b'{"group": "g", "metrics": {"trialRunId": true, "metrics": {"avgMetrics": {}}}}'),
        ("trials/1/metrics", b'{"group": "g", "metrics": {"trialId": 2, "trialRunId": 1}}'),
        ("journal", b'{"trialId": 1, "trialRunId": 1, "rank": 0, "records": [5]}'),
        ("journal", b'{"trialId": 1, "trialRunId": 1, "rank": 99999999999999999999, "records": []}'),
        ("journal", b""),
        ("runs/start", b'{"runId": "x"}'),
        ("runs/start", b'{"runId": 1e300}'),
        ("runs/start", b'{"runId": NaN}'),
        ("trials/1/progress", b'"\\ud800"'),
        ("trials/1/runner/metadata", b'{"state": "\\ud800"}'),
        ("trials/x/progress", b"1"),
        ("trials/99999999999/progress", b"1"),
        ("checkpoints", b'{"uuid": "u", "taskId": "t", "resources": {"a": -1}}'),
        ("checkpoints", b'{"uuid": "u", "taskId": "t", "reportTime": "yesterday"}'),
        ("task/logs", b'{"logs": [{"task_id": "t", "rank_id": 1e30}]}'),
        ("experiments", b'{"config": 5}'),
    ],
)
def test_a_request_that_cannot_be_understood_is_400(master: Running, path: str, body: bytes) -> None:
    answer = master.ask("POST", path, body)
    assert (answer.status, answer.error["code"], answer.error["reason"]) == (400, 3, "InvalidArgument"), answer.text


def test_what_is_not_there_is_501_and_nothing_redirects(master: Running) -> None:
    for method, path in (("GET", "nothing"), ("POST", "trials/1/nothing"), ("GET", "experiments/"), ("GET", "x//y")):
        answer = master.ask(method, path)
        assert (answer.status, answer.error["code"]) == (501, 12), path
    assert master.ask("PUT", "journal", {}).status == 405
    plain = master.ask("GET", "/nothing")
    assert (plain.status, set(plain.json)) == (404, {"message"})
    assert set(master.ask("POST", "/task-logs", {"a": 1}).json) == {"message"}
    assert master.ask("GET", "trials/424242").error["code"] == 5


def test_body_without_token_is_limited_to_64_kib(master: Running) -> None:
    body = {"username": "x" * (MAX_OPEN_BODY_BYTES - 200), "password": master.token}
    assert master.ask("POST", "auth/login", body, token=None).status == 200
    refused = master.ask("POST", "auth/login", {**body, "username": "x" * MAX_OPEN_BODY_BYTES}, token=None)
    assert (refused.status, refused.headers["Connection"]) == (413, "close")
    chunks = (b"x" * 1000 for _ in range(1000))
    assert master.ask("POST", "auth/login", chunks, token=None).status == 413


def test_ten_gigabytes_are_refused_while_they_come(master: Running) -> None:
    sent = 0

    def archive() -> Iterator[bytes]:
        nonlocal sent
        yield b'{"config": "{}", "b64Tgz": "'
        while sent < 10 << 30:
            sent += 1 << 16
            yield b"A" * (1 << 16)

    try:
        status = master.ask("POST", "experiments", archive()).status
    except OSError as e:  # the master has closed the connection while we still sent
        status = 413
        assert "reset" in str(e).lower() or "broken pipe" in str(e).lower()
    assert status == 413
    assert sent < 64 << 20
    assert master.ask("GET", "me").status == 200


def test_openapi_document_needs_no_token(master: Running) -> None:
    document = master.ask("GET", "/openapi.json", token=None).json
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    progress = document["paths"]["/api/v1/trials/{trial_id}/progress"]["post"]
    assert progress["security"] == [{"token": []}]
    assert json.dumps(progress["requestBody"]).count("$ref") == 1
    assert "JournalRequest" in json.dumps(document["paths"]["/api/v1/journal"])


def test_no_request_breaks_the_master(master: Running) -> None:
    from support.sweep import Sweep, as_described

    sweep = Sweep(master, examples=1, alternating=True)
    sweep.run(master.token, as_described)
    assert sweep.made > 50
    assert {200, 400, 404} <= sweep.statuses
    assert master.ask("GET", "me").status == 200
