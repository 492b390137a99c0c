"""A script as a client of the older generation runs it (0.37 and before): the master's operations say how far to train.

Usage: older.py INFO_FOLDER 0.36|0.37
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wire import TRIAL, Trial


def main(trial: Trial, *, old: bool) -> None:
    """Train as the operations say."""
    trial.start()
    path, step = f"api/v1/trials/{trial.id}", trial.restore()
    print(f"INFO: [1] recipe: run {trial.run_id} begins at {step}", flush=True)
    if step == 0:
        tell(trial)
    while True:
        answer = trial.ask("GET", f"{path}/searcher/operation")
        after = answer["op"]["validateAfter"]
        assert type(after["length"]) is str and trial.cluster["task_id"].endswith(after["requestId"])
        if answer["completed"]:
            trial.acknowledge()
            return
        length = int(after["length"])
        while step < length:
            step += 1
            trial.report("training", step, {"loss": trial.loss(step)}, batches=[{"loss": 1.0}, {"loss": float("inf")}])
            progress: Any = float(step) if old else {"progress": step}
            trial.ask("POST", f"{path}/progress", progress)
            if step % 2 == 0 and step < length:
                trial.save(step)
            trial.obey(step)
            if trial.should_preempt():
                trial.save(step)
                return
        trial.report("validation", step, {"loss": trial.loss(step), "odd": float("nan")})
        trial.save(step)
        done = {"op": {"length": length}, "searcherMetric": trial.loss(step)}
        trial.ask("POST", f"{path}/searcher/completed_operation", done)


def tell(trial: Trial) -> None:
    """Make all other calls of such a client (§5.3, §5.4, §5.8)."""
    path = f"api/v1/trials/{trial.id}"
    best = f"api/v1/experiments/{trial.experiment_id}/searcher/best_searcher_validation_metric"
    if trial.run_id == 1 and trial.config["searcher"]["name"] == "single":
        nothing = trial.answer("GET", best)
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, 5), "no validation yet"
    told = trial.ask("GET", path)["trial"]
    assert set(told) >= TRIAL and (told.get("latestValidation") or {}).get("totalBatches") is None
    trial.ask("POST", f"{path}/runner/metadata", {"state": "training"})
    metadata = {"who": {"name": "older"}, "list": [1, 2.5, None, True]}
    where = f"api/v1/runs/{trial.id}/metadata"
    assert trial.ask("GET", where) == {"metadata": {}}
    assert trial.ask("POST", where, {"metadata": metadata, "runId": trial.id}) == {"metadata": metadata}
    assert trial.ask("GET", where) == {"metadata": metadata}
    trial.report("cpu", None, {"agent": {"cpu_util_simple": 50.0}}, time="2024-01-01T00:00:00.5+00:00")
    assert trial.ask("POST", "api/v1/runs/start", {"runId": trial.id, "checkpointStorage": None}) == {}
    kept = trial.save(0)
    trial.report("validation", 0, {"loss": 100.0})
    source = {"checkpointUuid": kept, "trialId": trial.id, "trialSourceInfoType": "TRIAL_SOURCE_INFO_TYPE_INFERENCE"}
    answer = trial.ask("POST", "api/v1/trial-source-info", {"trialSourceInfo": source})
    assert answer == {"trialId": trial.id, "checkpointUuid": kept}
    for left, state in (({"sub/": "0", "sub/steps": "1"}, "PARTIALLY_DELETED"), ({}, "DELETED")):
        trial.remove(kept, whole=not left)
        patch = {"checkpoints": [{"uuid": kept, "resources": {"resources": left}}]}
        for _ in range(2):
            assert trial.ask("PATCH", "api/v1/checkpoints", patch) == {}
        found = trial.ask("GET", f"api/v1/checkpoints/{kept}")["checkpoint"]
        assert (found["state"], found["resources"]) == (f"STATE_{state}", left)


if __name__ == "__main__":
    old = sys.argv[2] == "0.36"
    client = Trial(Path(sys.argv[1]), old=old)
    main(client, old=old)
    client.close()
    assert not any(name.split(".")[0] in ("det_core", "determined") for name in sys.modules)
