"""A script as a client of the newer generation runs it (0.38): its length is in the configuration, its validations
drive the search, and its exit completes it.

Usage: newer.py INFO_FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from wire import TRIAL, Trial


def main(trial: Trial) -> None:
    """Train as the configuration says."""
    trial.start()
    searcher, step = trial.config["searcher"], trial.restore()
    length = searcher["max_length"] if searcher.get("max_length") is not None else searcher["max_time"]
    print(f"INFO: [1] recipe: run {trial.run_id} begins at {step}", flush=True)
    if step == 0:
        tell(trial)
    while step < length:
        step += 1
        trial.report("training", step, {"loss": trial.loss(step)})
        fraction = {"progress": step / length, "is_raw": True}
        trial.ask("POST", f"api/v1/trials/{trial.id}/progress", fraction)
        if step % 2 == 0:
            trial.report("validation", step, {"loss": trial.loss(step), "batches": step})
            trial.save(step)
        trial.obey(step)
        if trial.should_preempt():
            trial.save(step)
            return
        time.sleep(trial.hparams.get("pace", 0))


def tell(trial: Trial) -> None:
    """Make the calls that only such a client makes (§5.4, §5.8)."""
    data = {"title": "hello", "description": "from a trial", "level": "LOG_LEVEL_WARNING"}
    body = {"data": data, "experimentId": trial.experiment_id, "trialId": trial.id}
    assert trial.ask("POST", "api/v1/webhooks/custom", body) == {}
    found = trial.ask("GET", f"api/v1/trials/{trial.id}")["trial"]
    assert set(found) >= TRIAL and found["experimentId"] == trial.experiment_id


if __name__ == "__main__":
    client = Trial(Path(sys.argv[1]))
    if client.hparams.get("invalid"):
        client.start()
        client.close()
        body = {"reason": "EXITED_REASON_INVALID_HP"}  # the context is closed: on a connection of its own
        Trial(Path(sys.argv[1])).ask("POST", f"api/v1/trials/{client.id}/early_exit", body)
    else:
        main(client)
        client.close()
    assert not any(name.split(".")[0] in ("det_core", "determined") for name in sys.modules)
