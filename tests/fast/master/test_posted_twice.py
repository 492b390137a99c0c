"""Reports of a trial over HTTP count once, however often they come, and a zombie's never."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.processes import until
from support.real_master import Allocation, RealMaster
from support.recipe import Held

HALVING = {
    **{"name": "async_halving", "num_rungs": 2, "divisor": 4, "max_length": {"batches": 8}},
    **{"max_trials": 4, "max_concurrent_trials": 1},
}
SINGLE = {"name": "single", "max_length": 8}


class Speaker:
    """Client that sends each request several times: one after the other, and all at a time."""

    def __init__(self, real: RealMaster, me: Allocation) -> None:
        self._real, self._me = real, me

    def say(self, method: str, path: str, body: Any = None) -> None:
        """Send each request several times; each must be answered in the same way, with 200."""

        def once(_: int) -> tuple[int, str]:
            answer = self._real.ask(method, path, body, token=self._me.token)
            return answer.status_code, answer.text

        with ThreadPoolExecutor(4) as several:
            answers = {*several.map(once, range(4)), once(0), once(0)}
        assert len(answers) == 1 and next(iter(answers))[0] == 200, (method, path, answers)


def report(me: Allocation, group: str, step: int | None, values: Any, **more: Any) -> dict[str, Any]:
    """Return a report of metrics."""
    metrics = {"avgMetrics": values, "batchMetrics": more.pop("batches", None)}
    told = {"trialId": me.trial_id, "trialRunId": me.run_id, "stepsCompleted": step, "reportTime": None, **more}
    return {"group": group, "metrics": {**told, "metrics": metrics}}


def checkpoint(me: Allocation, name: str, step: int) -> dict[str, Any]:
    """Return a report of a checkpoint."""
    return {
        **{"uuid": name, "taskId": me.task_id, "allocationId": me.id, "storageId": None, "state": "STATE_COMPLETED"},
        **{"metadata": {"steps_completed": step}, "resources": {"a": "1", "b": "2"}, "training": {}},
        "reportTime": "2024-01-01T00:00:00.000000+00:00",
    }


def records(step: int) -> list[dict[str, Any]]:
    """Return a journal of some steps."""
    common = {"kind": "metrics", "group": "training", "metrics": {"loss": 0.5}}
    return [{**common, "seq": n, "time": 1.7e9 + n, "steps_completed": step + n} for n in range(1, 4)]


def test_each_counts_once(real: RealMaster, tmp_path: Path) -> None:
    held = Held(real, tmp_path, HALVING, max_restarts=1)
    me = held.allocation()
    say, trial = Speaker(real, me).say, f"trials/{me.trial_id}"
    say("POST", "runs/start", {"runId": me.trial_id, "checkpointStorage": {"type": "shared_fs", "host_path": "/a"}})
    nan = {"loss": "NaN", "accuracy": 0.5, "words": ["a", None]}
    say("POST", f"{trial}/metrics", report(me, "training", 1, nan, batches=[{"loss": "Infinity"}, {"loss": 1}]))
    say("POST", f"{trial}/metrics", report(me, "validation", 2, {"loss": 0.5}))
    say("POST", f"{trial}/metrics", report(me, "cpu", None, {"a": {"u": 1}}, reportTime="2024-01-01T00:00:00Z"))
    say("POST", f"{trial}/training_metrics", report(me, "", 2, {"loss": 1})["metrics"])
    body = {"trialId": me.trial_id, "trialRunId": me.run_id, "rank": 0, "restart": 0, "records": records(2)}
    say("POST", "journal", body)
    counted = {g: [r["totalBatches"] for r in real.rows(me.trial_id, g)] for g in ("training", "validation")}
    assert counted == {"training": [1, 2, 3, 4, 5], "validation": [2]}
    assert len(real.rows(me.trial_id, "cpu", archived="true")) == 1
    summary = real.get(trial)["trial"]["summaryMetrics"]["training"]
    assert summary["loss"]["count"] == 5 and summary["accuracy"]["count"] == 1

    name = str(uuid.uuid4())
    say("POST", "checkpoints", checkpoint(me, name, 2))
    assert [c["uuid"] for c in real.get(f"{trial}/checkpoints")["checkpoints"]] == [name]
    for left, state in (({"a": "1"}, "PARTIALLY_DELETED"), ({}, "DELETED")):
        say("PATCH", "checkpoints", {"checkpoints": [{"uuid": name, "resources": {"resources": left}}]})
        assert real.get(f"checkpoints/{name}")["checkpoint"]["state"] == f"STATE_{state}"

    say("POST", f"{trial}/progress", {"progress": 1.5})
    say("POST", f"runs/{me.trial_id}/metadata", {"runId": me.trial_id, "metadata": {"a": 1}})
    say("POST", f"{trial}/searcher/completed_operation", {"op": {"length": "2"}, "searcherMetric": 0.5})
    search = until(
        lambda: s if (s := real.get(f"experiments/{held.id}/search")["search"])["trialsRequested"] > 1 else None
    )
    assert search["trialsRequested"] == 2, "one completion asks for one new trial"
    events = search["events"]
    say("POST", f"{trial}/searcher/completed_operation", {"op": {"length": 2}, "searcherMetric": 0.5})
    assert real.get(f"experiments/{held.id}/search")["search"]["events"] == events
    say("POST", f"allocations/{me.id}/signals/ack_preemption")
    held.exit(me)
    found = real.get(trial)["trial"]
    assert (found["restarts"], found["trialRunId"], found["parked"]) == (0, 1, True)
    held.end()


def test_a_zombie_is_refused(real: RealMaster, tmp_path: Path) -> None:
    held = Held(real, tmp_path, SINGLE, max_restarts=1)
    old = held.allocation()
    held.exit(old, 1)
    new = held.allocation(run_id=2)
    trial = f"trials/{new.trial_id}"
    said: list[tuple[str, str, Any]] = [
        ("POST", f"{trial}/metrics", report(old, "training", 1, {"loss": 1})),
        ("POST", f"{trial}/validation_metrics", report(old, "", 1, {"loss": 1})["metrics"]),
        ("POST", "journal", {"trialId": old.trial_id, "trialRunId": 1, "rank": 0, "records": records(1)}),
        ("POST", "checkpoints", checkpoint(old, str(uuid.uuid4()), 1)),
        ("POST", f"allocations/{old.id}/signals/ack_preemption", None),
        ("POST", f"allocations/{old.id}/signals/pending_preemption", None),
    ]
    by_token: list[tuple[str, str, Any]] = [
        ("POST", f"{trial}/searcher/completed_operation", {"op": {"length": 8}, "searcherMetric": 1}),
        ("GET", f"{trial}/searcher/operation", None),
        ("POST", f"{trial}/early_exit", {"reason": "EXITED_REASON_INVALID_HP"}),
        ("POST", f"{trial}/progress", {"progress": 8}),
        ("POST", f"{trial}/runner/metadata", {"state": "x"}),
        ("POST", f"runs/{old.trial_id}/metadata", {"metadata": {"x": 1}}),
        ("POST", "runs/start", {"runId": old.trial_id, "checkpointStorage": None}),
        ("PATCH", "checkpoints", {"checkpoints": []}),
        ("POST", "task/logs", {"logs": [{"task_id": old.task_id, "log": "x\n"}]}),
        ("GET", f"allocations/{old.id}/signals/preemption?timeout_seconds=60", None),
    ]
    for method, path, body in said + by_token:
        late = real.ask(method, path, body, token=old.token)
        assert (late.status_code, late.json()["error"]["error"]) == (401, "invalid credentials"), path
    for method, path, body in said:
        others = real.ask(method, path, body, token=new.token)
        assert others.status_code in (403, 409), (path, others.text)
        mine = real.ask(method, path, body)
        assert (mine.status_code, mine.json()["error"]["code"]) == (409, 6), (path, mine.text)
    spins = real.get(f"allocations/{old.id}/signals/preemption?timeout_seconds=1")
    assert spins == {"preempt": False}, "of an attempt that is over"
    found = real.get(trial)["trial"]
    assert (found["trialRunId"], found["operationCompleted"], found["progress"]) == (2, False, 0.0)
    assert "latestValidation" not in found and real.rows(new.trial_id, "training", archived="true") == []
    assert real.get(f"{trial}/checkpoints")["checkpoints"] == []
    assert (
        real.ask("POST", f"{trial}/metrics", report(new, "training", 1, {"loss": 1}), token=new.token).status_code
        == 200
    )
    held.end()
