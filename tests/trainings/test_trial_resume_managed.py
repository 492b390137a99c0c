"""Trials of a real master, on one slot and on two: killed and paused, they end as the straight one, to the last bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from support.killed import digest, equal_but_for_stops
from support.person import Person
from support.processes import until

torch = pytest.importorskip("torch")

CONFIG = """
name: resumed
entrypoint: model_def:Trial
searcher: {{name: single, metric: error, max_length: {{epochs: 8}}}}
hyperparameters: {{}}
resources: {{slots_per_trial: {slots}}}
reproducibility: {{experiment_seed: 7}}
min_checkpoint_period: {{batches: 7}}
min_validation_period: {{epochs: 1}}
scheduling_unit: 3
checkpoint_policy: none
max_restarts: 50
checkpoint_storage: {{type: directory, container_path: {store}, save_trial_latest: 100}}
environment:
  environment_variables: [RECORDS=96, BATCH=8, WORKERS={workers}, OMP_NUM_THREADS=1, PACE={pace}, PROGRESS={progress}]
"""


class Experiments:
    """Experiments of one trial each, at a master.

    Args:
        person: creates them.
        slots: of each.
        workers: that load data, on each rank.
    """

    def __init__(self, person: Person, slots: int, workers: int) -> None:
        self.person, self.slots, self.workers = person, slots, workers
        (person.folder / "code").mkdir()
        shutil.copy(TESTS / "support" / "noisy_trial.py", person.folder / "code" / "model_def.py")

    def create(self, pace: float = 0.0) -> int:
        """Create another experiment, which waits ``pace`` seconds before each batch."""
        folder = self.person.folder / f"experiment-{len(list(self.person.folder.glob('experiment-*'))) + 1}"
        (folder / "store").mkdir(parents=True)
        (folder / "progress").touch()
        (folder / "config.yaml").write_text(CONFIG.format(
            slots=self.slots, workers=self.workers, store=folder / "store", pace=pace, progress=folder / "progress",
        ))  # fmt: skip
        return int(self.person.reads("experiment", "create", str(folder / "config.yaml"), "code")["id"])

    def ranks_at(self, number: int, batch: int, known: set[int]) -> list[int]:
        """Wait until processes that are not known have trained so many batches; their ids."""
        found: dict[int, int] = {}

        def there() -> bool:
            for line in (self.person.folder / f"experiment-{number}" / "progress").read_text().splitlines():
                pid, trained = map(int, line.split())
                found[pid] = trained
            return sum(found[pid] >= batch for pid in found.keys() - known) == self.slots

        until(there)
        return sorted(found.keys() - known)

    def end_of(self, number: int) -> tuple[list[Any], list[Any], str]:
        """Return rows of training and of validation, and a digest of the last checkpoint."""
        self.person.types("det-core", "experiment", "wait", str(number))
        (trial,) = self.person.reads("trial", "list", str(number))
        training, validation = (
            [
                (row["steps_completed"], row["metrics"])
                for row in self.person.reads("trial", "metrics", str(trial["id"]), "--group", group)
            ]
            for group in ("training", "validation")
        )
        saved = max(self.person.folder.glob(f"experiment-{number}/store/*/trial_state.json"), key=batches_of)
        assert batches_of(saved) == 96
        state = torch.load(saved.with_name("state_dict.pth"), weights_only=True)
        state["rng_state"] = state["rng_state"]["torch"]
        return training, validation, digest(state)


def batches_of(trial_state: Path) -> int:
    return int(json.loads(trial_state.read_text())["batches_trained"])


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    somebody = Person(tmp_path)
    somebody.types("det-core", "master", "up", "--slots", "2")
    yield somebody
    somebody.leaves()


def kill_one(experiments: Experiments, number: int, batch: int, rng: random.Random, known: set[int]) -> None:
    """Kill one rank of those that are not known when they are at that batch; then all of them are."""
    ranks = experiments.ranks_at(number, batch, known)
    os.kill(rng.choice(ranks), signal.SIGKILL)
    known.update(ranks)


@pytest.mark.parametrize("slots", [1, 2])
def test_killed_and_paused(person: Person, slots: int) -> None:
    rng, experiments = random.Random(slots), Experiments(person, slots, workers=0)
    straight = experiments.end_of(experiments.create())
    number, known = experiments.create(pace=0.03), set[int]()
    kill_one(experiments, number, rng.randrange(10, 35), rng, known)
    experiments.ranks_at(number, rng.randrange(45, 60), known)
    person.types("det-core", "experiment", "pause", str(number))
    until(lambda: person.reads("experiment", "describe", str(number))["state"] == "PAUSED")
    person.types("det-core", "experiment", "activate", str(number))
    training, validation, state = experiments.end_of(number)
    equal_but_for_stops(training, straight[0], 1)
    assert validation == straight[1]
    assert state == straight[2]
