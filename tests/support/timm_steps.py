"""Somebody who follows the README of ``examples/timm_port``: in a copy of that folder, with a master of two slots."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support import EXAMPLES
from support.person import Person

EXAMPLE = EXAMPLES / "timm_port"
STEPS = ("step0-run", "step1-distributed", "step2-metrics", "step3-checkpoints", "step4-hyperparameters")
README = (EXAMPLE / "README.md").read_text()
LAUNCHER = ("python", "-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2")
LENGTH = 5
"""Epochs of each training."""
ACCURACY = 95.0
EPOCH = re.compile(r"Epoch (\d+): (.*); validation: (.*)")
MEASURED = ("images_per_second",)
"""Metrics that differ between any two runs."""


def timm_or_skip() -> None:
    """Skip a test that needs timm where it is not; in CI, let it fail."""
    if (found := find_spec("timm")) is None or found.origin is None:  # a folder of this name has none
        reason = "timm is not installed here: make test-timm"
        if os.environ.get("CI"):
            pytest.fail(f"this is CI, and {reason}")
        pytest.skip(reason)


def commands() -> list[tuple[str, bool]]:
    """Return the commands of the README's steps, and whether each is to be interrupted on its way."""
    return [command for part in README.split("## Step ")[1:] for command in _commands(part)]


def short() -> list[tuple[str, bool]]:
    """Return the commands of steps 0, 3 and 4, without adaptive ASHA."""
    parts = README.split("## Step ")[1:]
    return [command for n in (0, 3, 4) for command in _commands(parts[n]) if "adaptive" not in command[0]]


def _commands(part: str) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for line in part.splitlines():
        text, _, remark = line.partition("#")
        if re.match(r" {4}(python|det-core|DET_CORE_RESUME=latest) ", text):
            found.append((text.strip(), "Ctrl-C" in remark))
        elif line.startswith("    # ") and "Ctrl-C" in remark:
            found[-1] = (found[-1][0], True)
    return found


class Reader(Person):
    """Types what the README says.

    Args:
        folder: where the copy, the digits and the home folder go.
    """

    def __init__(self, folder: Path) -> None:
        ignored = shutil.ignore_patterns("output", "__pycache__")
        shutil.copytree(EXAMPLE, folder / "timm_port", ignore=ignored)
        super().__init__(folder / "timm_port")
        grid = self.folder / "step4-hyperparameters.yaml"
        grid.write_text(grid.read_text().replace("count: 5", "count: 3"))  # two trials less, as the commands are tried
        self.home = folder / "home"
        kept = {k: v for k, v in self.environment.items() if not k.startswith("DET_")}
        mine = {"DET_CORE_HOME": str(self.home), "XDG_CACHE_HOME": str(folder / "cache")}
        self.environment = {**kept, **mine}

    def follows(self, command: str) -> str:
        """Run a line of the README to its end; what it says."""
        done = self.types("bash", "-c", command)
        return done.stdout + done.stderr

    def follows_all(self, commands: list[tuple[str, bool]]) -> dict[str, str]:
        """Run lines of the README one after the other, and press Ctrl-C where it says so; what each says."""
        found = {}
        for command, interrupted in commands:
            if not interrupted:
                found[command] = self.follows(command)
                continue
            watching = command.startswith("det-core")
            after = "Epoch 0:" if watching else "Epoch 1:"
            status, text = self.interrupts("bash", "-c", f"exec {command}", after=after, by=signal.SIGINT)
            assert watching or status == 0, text
            found[f"{command} # Ctrl-C"] = text
        return found

    def interrupts(self, *words: str, after: str, by: int, **variables: str) -> tuple[int, str]:
        """Run a command that gets a signal once its log has a line; its status, and what it says."""
        said, sent = [], False
        environment = {**self.environment, **variables}
        with subprocess.Popen(
            words, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as job:
            try:
                assert job.stdout is not None
                for line in job.stdout:
                    said.append(line)
                    if after in line and not sent:
                        job.send_signal(by)
                        sent = True
            finally:
                job.kill()
        assert sent, "".join(said)
        return job.returncode, "".join(said)

    def trains(self, *words: str, **variables: str) -> list[dict[str, float]]:
        """Run a script to its end, and return the metrics of each epoch in its log."""
        return epochs_of(self.types(*words, **variables).stderr)

    def experiment(self, name: str) -> Any:
        """Return the description of the first experiment of a name, which must have completed."""
        number = min(e["id"] for e in self.reads("experiment", "list") if e["name"] == name)
        told = self.reads("experiment", "describe", str(number))
        assert told["state"] == "COMPLETED"
        return told

    def creates(self, config: str, *words: str) -> int:
        """Create an experiment on this directory, and return its ID."""
        return int(self.reads("experiment", "create", config, ".", *words)["id"])

    def sees_completed(self, experiment_id: int) -> Any:
        """Wait for an experiment to complete, and return its description."""
        self.types("det-core", "experiment", "wait", str(experiment_id))
        return self.reads("experiment", "describe", str(experiment_id))

    def finds(self, trial_id: int, group: str = "validation") -> list[tuple[int, dict[str, Any]]]:
        """Return the metrics of a trial by step, but for those that differ between any two runs."""
        rows = self.reads("trial", "metrics", str(trial_id), "--group", group)
        return [
            (row["steps_completed"], {k: v for k, v in row["metrics"].items() if k not in MEASURED}) for row in rows
        ]

    def fetches(self, experiment_id: int, *options: str) -> dict[str, Any]:
        """Return timm's state in a checkpoint of an experiment, by default its best."""
        place = f"fetched-{experiment_id}"
        self.types("det-core", "experiment", "download-checkpoint", str(experiment_id), place, *options)
        return loaded(self.folder / place / "data")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Yield a user with a machine of two slots."""
    timm_or_skip()
    found = Reader(tmp_path_factory.mktemp("reader"))
    try:
        found.types("det-core", "master", "up", "--slots", "2")
        yield found
    finally:
        found.leaves()


def epochs_of(log: str) -> list[dict[str, float]]:
    """Return the metrics of each epoch in a log: those of the training, and of the validation with ``val_``."""
    found = []
    for epoch, training, validation in EPOCH.findall(log):
        values = {"epoch": float(epoch)}
        for prefix, text in (("", training), ("val_", validation)):
            values |= {prefix + name: float(value) for name, value in (item.split() for item in text.split(", "))}
        found.append(values)
    return found


def loaded(path: Path) -> dict[str, Any]:
    """Return the content of a file that timm has saved."""
    import argparse

    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        found: dict[str, Any] = torch.load(path, map_location="cpu")
    return found


def assert_equal_bit_by_bit(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two checkpoints: weights, their averages, the optimizer's state, and how far they are."""
    for name in ("state_dict", "state_dict_ema"):
        assert len(one[name]) > 10
        assert_same(one[name], other[name], name)
    for name in ("optimizer", "epoch", "metric"):
        assert_same(one[name], other[name], name)


def assert_same(one: Any, other: Any, where: str) -> None:
    """Assert that two values are of one kind, and equal to the last bit."""
    import torch

    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes(), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{number}]")
    else:
        assert one == other, where
