"""Logs and metrics, line by line."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from det_core.master.api import _logs
from support.processes import until
from support.running_master import CONFIG, Running

SEARCH = CONFIG.replace("{name: single,", "{name: random, max_trials: 2,")


def lines(spec: object, *texts: str, **more: object) -> dict[str, object]:
    """Log lines, as ``ship_logs`` sends them (§7.1)."""
    line = {"task_id": spec.task_id, "allocation_id": spec.allocation_id, "agent_id": "a", "container_id": "c"}
    line |= {"rank_id": 1, "timestamp": "2024-01-01T00:00:00.5Z", "level": "LOG_LEVEL_WARNING", "stdtype": "stderr"}
    return {"logs": [line | {"source": "task", "log": text} | more for text in texts]}


def test_lines_come_back_in_order_with_all_that_was_said(master: Running) -> None:
    spec = master.a_trial()
    assert master.ask("POST", "task/logs", lines(spec, "one\n", "two\n"), spec.session_token).json == {}
    for path in (f"trials/{spec.trial_id}/logs", f"tasks/{spec.task_id}/logs"):
        first, second = master.ask("GET", path, token=spec.session_token).lines
        assert (first["log"], second["log"], first["message"]) == ("one\n", "two\n", "one\n")
        assert (first["rankId"], first["level"], first["stdtype"]) == (1, "LOG_LEVEL_WARNING", "stderr")
        assert first["timestamp"].startswith("2024-01-01T00:00:00.5")
        assert (first["id"], second["id"][:9]) == ("1.0.task.0", "1.0.task.")
        assert [line["log"] for line in master.ask("GET", f"{path}?after={first['id']}").lines] == ["two\n"]
        assert [line["log"] for line in master.ask("GET", f"{path}?limit=1").lines] == ["one\n"]


def test_a_log_that_is_followed_ends_with_its_trial(master: Running) -> None:
    spec = master.a_trial()
    master.ask("POST", "task/logs", lines(spec, "before\n"), spec.session_token)
    seen: list[str] = []
    came = threading.Event()

    def follow() -> None:
        url = f"{master.url}/api/v1/trials/{spec.trial_id}/logs?follow=true"
        headers = {"Authorization": f"Bearer {master.token}"}
        with requests.get(url, headers=headers, stream=True) as response:
            for line in response.iter_lines(chunk_size=None):
                seen.append(json.loads(line)["result"]["log"])
                came.set()

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        assert came.wait()
        assert master.ask("POST", "task/logs", lines(spec, "after\n"), spec.session_token).status == 200
        until(lambda: seen[1:] == ["after\n"])
        assert not following.done()
        master.end(spec.allocation_id)
        following.result()
    assert seen[:2] == ["before\n", "after\n"]


def test_silent_log_that_is_followed_sends_blank_lines(master: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logs, "BLANK_LINE_INTERVAL", 0.1)
    spec = master.a_trial()
    url = f"{master.url}/api/v1/trials/{spec.trial_id}/logs?follow=true"
    with requests.get(url, headers={"Authorization": f"Bearer {master.token}"}, stream=True) as response:
        came = response.iter_lines(chunk_size=None)
        assert [next(came), next(came)] == [b"", b""]
        master.ask("POST", "task/logs", lines(spec, "said\n"), spec.session_token)
        master.end(spec.allocation_id)
        assert "said\n" in [json.loads(line)["result"]["log"] for line in came if line]


def test_logs_of_an_experiment_are_merged_by_time(master: Running) -> None:
    first, second = master.launched(master.created(SEARCH), 2)
    for second_of_day, spec in enumerate([first, second, second, first, second]):
        body = lines(spec, f"{second_of_day}\n", timestamp=f"2024-01-01T00:00:0{second_of_day}Z")
        master.ask("POST", "task/logs", body, spec.session_token)
    master.ask("POST", "task/logs", lines(first, "5\n", level="LOG_LEVEL_ERROR"), first.session_token)
    path = f"experiments/{first.experiment_id}/logs"
    found = master.ask("GET", path, token=first.session_token).lines
    assert [line["log"] for line in found] == [f"{n}\n" for n in range(6)]
    assert [line["trialId"] - first.trial_id for line in found] == [0, 1, 1, 0, 1, 0]
    assert [line["log"] for line in master.ask("GET", f"{path}?tail=3").lines] == ["3\n", "4\n", "5\n"]
    assert [line["log"] for line in master.ask("GET", f"{path}?level=ERROR&tail=3").lines] == ["5\n"]
    assert master.ask("GET", f"{path}?tail=1&after={found[-1]['cursor']}").status == 400
    assert master.ask("GET", f"{path}?after=1.0.task.0").status == 400
    assert master.ask("GET", "experiments/99999/logs?follow=true").status == 404


def test_each_line_behind_a_cursor_comes_once(master: Running) -> None:
    specs = master.launched(master.created(SEARCH), 2)
    path = f"experiments/{specs[0].experiment_id}/logs"
    sent: list[str] = []
    received: list[str] = []
    cursor = ""
    for step in range(20):
        for spec in specs[: 1 + step % 2]:
            texts = [f"{spec.trial_id} {step} {n}\n" for n in range(step % 3)]
            sent += texts
            assert master.ask("POST", "task/logs", lines(spec, *texts)).status == 200
        if step == 10:
            master.end(specs[1].allocation_id)
        for line in master.ask("GET", f"{path}?after={cursor}").lines:
            received.append(line["log"])
            cursor = line.get("cursor", cursor)
    assert sorted(line for line in received if line[0].isdigit()) == sorted(sent)
    assert len(set(received)) == len(received)


def test_logs_of_an_experiment_that_are_followed_end_with_it(master: Running) -> None:
    first, second = master.launched(master.created(SEARCH), 2)
    master.ask("POST", "task/logs", lines(first, "old\n", "before\n"), first.session_token)
    url = f"{master.url}/api/v1/experiments/{first.experiment_id}/logs?follow=true&tail=1"
    with requests.get(url, headers={"Authorization": f"Bearer {master.token}"}, stream=True) as response:
        came = (json.loads(line)["result"] for line in response.iter_lines(chunk_size=None) if line)
        assert next(came)["log"] == "before\n"
        master.ask("POST", "task/logs", lines(second, "after\n"), second.session_token)
        assert next(came)["log"] == "after\n"
        master.end(first.allocation_id)
        master.ask("POST", "task/logs", lines(second, "last\n"), second.session_token)
        master.end(second.allocation_id)
        assert "last\n" in [line["log"] for line in came]


def test_metrics_come_in_pages_without_the_superseded(master: Running) -> None:
    spec = master.a_trial()
    records = [
        {"kind": "metrics", "seq": i, "time": 1.7e9, "group": "training", "steps_completed": i, "metrics": {"x": i}}
        for i in range(2500)
    ]
    body = {"trialId": spec.trial_id, "trialRunId": 1, "rank": 0, "records": records}
    assert master.ask("POST", "journal", body, spec.session_token).status == 200
    read = master.ask("GET", f"trials/metrics/training_metrics?trialIds={spec.trial_id}")
    assert read.headers["content-type"] == "application/x-ndjson"
    assert [row["totalBatches"] for line in read.lines for row in line["metrics"]] == list(range(2500))
    assert max(len(line["metrics"]) for line in read.lines) == 1000
    assert master.ask("GET", f"trials/metrics/validation_metrics?trialIds={spec.trial_id}").lines == []
    assert master.ask("GET", "trials/metrics/trial_metrics").status == 400


def test_lines_are_ascii_so_that_a_reader_splits_them_at_line_feeds_alone(master: Running) -> None:
    spec = master.a_trial()
    master.ask("POST", "task/logs", lines(spec, "a\u2028b\x85c\n"))
    answer = master.ask("GET", f"trials/{spec.trial_id}/logs")
    assert answer.text.isascii()
    assert [line["log"] for line in answer.lines] == ["a\u2028b\x85c\n"]


def test_a_log_of_nothing_is_404(master: Running) -> None:
    assert master.ask("GET", "trials/99999/logs?follow=true").status == 404
    assert master.ask("GET", "tasks/99999.x/logs").status == 404
