"""Experiments whose scripts are written from the contract alone, with nothing but requests."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path
from typing import Any

from support import TESTS
from support.processes import until
from support.real_master import Allocation, RealMaster

FOLDER = TESTS / "support" / "recipe_scripts"
FIXED, OURS = "/run/determined/info", '"$DET_CORE_INFO_DIR"'
"""Where a script looks for its information files: where the contract says, or where the variable says."""


def files() -> dict[str, str]:
    """Return the scripts by name."""
    return {path.name: path.read_text() for path in FOLDER.glob("*.py")}


def config(entrypoint: str, store: Path, searcher: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a configuration; ``more`` are hyperparameters, but for ``max_restarts``."""
    restarts = more.pop("max_restarts", 0)
    return {
        "name": "recipe",
        "entrypoint": f"python {entrypoint}",
        "hyperparameters": {"lr": 0.5, **more},
        "searcher": {"metric": "loss", **searcher},
        "checkpoint_storage": {"type": "directory", "container_path": str(store), "save_trial_best": 0},
        "max_restarts": restarts,
        "reproducibility": {"experiment_seed": 16},
    }


def no_namespaces() -> str | None:
    """Return the reason why the files cannot appear at the fixed path here; None if they can."""
    done = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"no mount namespaces here: {done.stderr.strip()}"


def last_row(real: RealMaster, number: int) -> tuple[int, int] | None:
    """Return step and run of the last training row of an experiment's first trial."""
    rows = [r for t in real.trials(number)[:1] for r in real.rows(t["id"], "training")]
    return (rows[-1]["totalBatches"], rows[-1]["trialRunId"]) if rows else None


def completed(real: RealMaster, number: int) -> dict[str, Any]:
    """Wait until an experiment has completed, and return its one trial."""
    real.until(number, "STATE_COMPLETED")
    (trial,) = real.trials(number)
    found: dict[str, Any] = real.get(f"trials/{trial['id']}")["trial"]
    return found


def check_course(real: RealMaster, trial: dict[str, Any]) -> None:
    """Run 1 failed at 3 with a checkpoint at 2, run 2 was paused at 5, run 3 came to 8; all of it counts once."""
    assert (trial["state"], trial["restarts"], trial["trialRunId"]) == ("STATE_COMPLETED", 1, 3)
    rows = real.rows(trial["id"], "training")
    runs = {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3, 7: 3, 8: 3}
    assert [(r["totalBatches"], r["trialRunId"]) for r in rows] == list(runs.items())
    assert [r["metrics"]["avgMetrics"] for r in rows] == [{"loss": 0.5 + 1 / (1 + step)} for step in runs]
    hidden = [r for r in real.rows(trial["id"], "training", archived="true") if r["archived"]]
    assert [(r["totalBatches"], r["trialRunId"]) for r in hidden] == [(3, 1)]
    lines = real.logs(trial["id"])
    assert [line["log"] for line in lines if "begins" in line["log"]] == [
        f"[1] recipe: run {run} begins at {step}\n" for run, step in ((1, 0), (2, 2), (3, 5))
    ]
    (failed,) = [line for line in lines if "it fails" in line["log"]]
    assert (failed["level"], failed["stdtype"], failed["source"]) == ("LOG_LEVEL_ERROR", "stderr", "task")
    assert trial["latestValidation"]["metrics"]["avgMetrics"]["loss"] == 0.5 + 1 / 9
    assert trial["totalBatchesProcessed"] == 8 and trial["progress"] == 1.0


class Held:
    """An experiment whose scripts only live: the test reports in their place, with their tokens.

    Args:
        real: the master.
        folder: an empty one.
        searcher: of the configuration.
        more: hyperparameters, and ``max_restarts``.
    """

    def __init__(self, real: RealMaster, folder: Path, searcher: dict[str, Any], **more: Any) -> None:
        self._real, self._words = real, folder / f"words-{uuid.uuid4()}"
        self._words.mkdir()
        self.id = real.create(config(f"hold.py {self._words}", folder / "store", searcher, **more), files())

    def allocation(self, run_id: int = 1, trial: int = 0) -> Allocation:
        """Wait until one of the trials runs, and return its allocation."""

        def look() -> Allocation | None:
            found = self._real.trials(self.id)
            name = found[trial].get("allocationId") if len(found) > trial else None
            told = self._real.allocation(name) if name else None
            return told if told is not None and told.run_id == run_id else None

        return until(look)

    def exit(self, allocation: Allocation, status: int = 0) -> None:
        """Have the script exit, and wait until the master knows."""
        aside = self._words / "aside"
        aside.write_text(str(status))
        aside.rename(self._words / allocation.id)

        def over() -> bool:
            return self._real.get(f"trials/{allocation.trial_id}")["trial"].get("allocationId") != allocation.id

        until(over)

    def end(self) -> None:
        """Kill it."""
        self._real.post(f"experiments/{self.id}/kill")
        until(lambda: "endTime" in self._real.get(f"experiments/{self.id}")["experiment"])
