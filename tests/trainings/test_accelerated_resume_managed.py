"""A trial of a real master, on one slot and on two: killed and paused, it ends as the straight one, to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.accelerated import ONE_RUN, SCRIPT, assert_same
from support.processes import until
from support.real_master import RealMaster, real_master

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

EPOCHS = 4
UPDATES = {1: 20, 2: 12}


@pytest.fixture
def master(tmp_path: Path) -> Iterator[RealMaster]:
    with real_master(tmp_path / "home", "--slots", "2") as running:
        yield running


class Job:
    """An experiment of one trial that trains by the accelerated Trainer.

    Args:
        master: the master.
        folder: made here; where its checkpoints and what it notes go.
        slots: of the trial.
        pace: seconds that it waits after each batch.
    """

    def __init__(self, master: RealMaster, folder: Path, slots: int, pace: float = 0.01) -> None:
        folder.mkdir()
        self.master, self.folder, self.slots = master, folder, slots
        self.killed: set[int] = set()
        variables = {"DATA": folder, "EPOCHS": EPOCHS, "WORKERS": 0, "PACE": pace, "OMP_NUM_THREADS": 1}
        launcher = "python -m det_core.launch.torch_distributed" if slots > 1 else "python"
        self.number = master.create(
            {
                "name": folder.name,
                "entrypoint": f"{launcher} script.py",
                "searcher": {"name": "single", "metric": "eval_loss_epoch", "max_length": {"epochs": EPOCHS}},
                "hyperparameters": {},
                "resources": {"slots_per_trial": slots},
                "reproducibility": {"experiment_seed": 7},
                "max_restarts": 5,
                "checkpoint_storage": {
                    "type": "directory",
                    "container_path": str(folder / "store"),
                    "save_trial_latest": 100,
                },
                "environment": {"environment_variables": [f"{name}={value}" for name, value in variables.items()]},
            },
            {"script.py": SCRIPT + ONE_RUN},
        )

    def noted(self, rank: int) -> list[Any]:
        """Return the process, and its notes of each batch."""
        path = self.folder / f"data-1-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]]")]

    def after(self, batches: int) -> list[int]:
        """Wait until each rank of a start without a kill has trained so many batches; the processes."""

        def trained() -> list[list[int]]:
            pids = ([pid for pid, _ in self.noted(rank)] for rank in range(self.slots))
            return [[pid for pid in told if pid not in self.killed] for told in pids]

        until(lambda: all(len(told) >= batches for told in trained()))
        return [told[-1] for told in trained()]

    def kill_one(self, batches: int, rng: random.Random) -> None:
        """Kill a rank once all have trained so many batches since the last kill."""
        pids = self.after(batches)
        os.kill(rng.choice(pids), signal.SIGKILL)
        self.killed.update(pids)

    def pause(self) -> None:
        """Pause it, and let it go on."""
        self.master.post(f"experiments/{self.number}/pause")
        self.master.until(self.number, "STATE_PAUSED")
        self.master.post(f"experiments/{self.number}/activate")

    def ended(self) -> tuple[dict[str, Any], list[Any], dict[Any, Any]]:
        """Return the state at the end, the reports, and each batch as it was noted."""
        self.master.until(self.number, "STATE_COMPLETED")
        (trial,) = self.master.trials(self.number)
        reported = [
            (row["totalBatches"], {k: v for k, v in row["metrics"]["avgMetrics"].items() if k != "samples_per_second"})
            for group in ("training", "validation")
            for row in self.master.rows(trial["id"], group)
        ]
        places = self.folder.glob("store/*/state.pt")
        told = {path.parent: torch.load(path, weights_only=True)["position"] for path in places}
        folder, last = max(told.items(), key=lambda item: (item[1]["updates"], item[1]["epoch"]))
        assert (last["updates"], last["epoch"], last["batch"]) == (UPDATES[self.slots], EPOCHS, 0)
        batches: dict[Any, Any] = {}
        for rank in range(self.slots):
            for _, (epoch, step, *what) in self.noted(rank):
                assert batches.setdefault((rank, epoch, step), what) == what
        state = torch.load(folder / "state.pt", weights_only=True)
        state["position"].pop("trial_id")
        return state, reported, batches


@pytest.mark.parametrize("slots", [1, 2])
def test_killed_and_paused_under_a_master(master: RealMaster, tmp_path: Path, slots: int) -> None:
    rng = random.Random(slots)
    straight = Job(master, tmp_path / "straight", slots).ended()
    job = Job(master, tmp_path / "disturbed", slots)
    job.kill_one(rng.randrange(1, 10), rng)
    job.after(rng.randrange(1, 6))
    job.pause()
    state, reported, batches = job.ended()
    assert reported == straight[1]
    assert batches == straight[2]
    assert_same(state, straight[0])
    (trial,) = master.trials(job.number)
    log = "".join(line["log"] for line in master.logs(trial["id"]))
    assert log.count("Resumed at batch") + log.count("from scratch") >= 3, log
    assert "PREEMPTED at" in log
