"""The quickstart with FSDP2, DeepSpeed and Horovod: its size, and that it goes on exactly, bare and under a master."""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from det_core import client
from det_core.storage import DirectoryStore
from support import ROOT, frameworks
from support.person import Person
from support.processes import until
from support.ranks import watched

EXAMPLE = ROOT / "examples" / "quickstart_frameworks"
QUICKSTART = ROOT / "examples" / "quickstart"
EPOCHS, STEPS = 4, 45


@dataclass(frozen=True)
class Framework:
    """One of the scripts.

    Attributes:
        launcher: its module in ``det_core.launch``.
        files: what a checkpoint holds, of two ranks.
        epochs: how many short ones take so long that a person can pause the trial meanwhile.
        resizes: whether one process goes on where two stopped.
    """

    name: str
    launcher: str
    files: set[str]
    epochs: int
    resizes: bool = True

    @property
    def script(self) -> Path:
        """The script."""
        return EXAMPLE / f"train_{self.name}.py"

    @property
    def python(self) -> str:
        """An interpreter that has the framework."""
        if self.name == "fsdp2":
            if not (find_spec("torch") and find_spec("sklearn")):
                pytest.skip("the quickstart needs torch and scikit-learn")
            return sys.executable
        frameworks.need()
        return frameworks.PYTHON

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its processes."""
        return {"OMP_NUM_THREADS": "1"} if self.name == "fsdp2" else frameworks.variables()

    @property
    def words(self) -> list[str]:
        """The script and its options."""
        return [str(self.script), "--epochs", str(EPOCHS), "--width", "8"]

    def command(self, ranks: int) -> list[str]:
        """Return the command that starts it; one rank: as a plain script."""
        launcher = ["-m", f"det_core.launch.{self.launcher}", "--nproc-per-node", str(ranks)]
        return [self.python, *(launcher if ranks > 1 else []), *self.words]


FSDP2 = Framework("fsdp2", "torch_distributed", {".metadata", "__0_0.distcp", "__1_0.distcp"}, epochs=12)
DEEPSPEED = Framework(
    "deepspeed",
    "deepspeed",
    {"state/mp_rank_00_model_states.pt", *(f"state/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))},
    epochs=24,
    resizes=False,
)
HOROVOD = Framework("horovod", "horovod", {"state.pt"}, epochs=60)
ALL = (FSDP2, DEEPSPEED, HOROVOD)
HERE = pytest.mark.parametrize("framework", [FSDP2], ids=lambda f: f.name)
"""Frameworks without a venv of their own; of the others see ``tests/launchers``."""


def train(framework: Framework, home: Path, ranks: int = 2, *more: str, stop_after: int | None = None) -> str:
    """Train, or resume, with a SIGTERM after epoch ``stop_after``; return the output."""
    environment = {**os.environ, **framework.variables, "DET_CORE_HOME": str(home), "DET_CORE_RESUME": "latest"}
    if framework is FSDP2:  # warm; its launcher is that of the trial below
        at = None if stop_after is None else f"epoch {stop_after}/"
        return watched([*framework.words, *more], ranks if ranks > 1 else None, env=environment, at=at)
    command = [*framework.command(ranks), *more]
    printed = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            assert job.stdout is not None
            for line in job.stdout:
                printed.append(line)
                if stop_after is not None and f"epoch {stop_after}/" in line:
                    job.send_signal(signal.SIGTERM)
            assert job.wait() == 0, "".join(printed)
        finally:
            job.kill()
    return "".join(printed)


def rows(home: Path) -> list[Any]:
    """Return all reported rows."""
    return [(row.group, row.steps_completed, row.metrics) for row in client.run("latest", home).rows()]


def check_rows(found: list[Any], epochs: int = EPOCHS, steps: int = STEPS) -> None:
    """Check that every step is there once, and every validation."""
    reported = {group: [step for g, step, _ in found if g == group] for group in ("training", "validation")}
    assert reported["training"] == list(range(1, epochs * steps + 1))
    assert reported["validation"] == [steps * epoch for epoch in range(1, epochs + 1)]


@pytest.mark.parametrize("framework", ALL, ids=lambda f: f.name)
def test_each_is_at_most_40_lines_longer_than_the_plain_script(framework: Framework) -> None:
    plain = (QUICKSTART / "train_plain.py").read_text().splitlines()
    assert len(plain) < len(framework.script.read_text().splitlines()) <= len(plain) + 40


def test_the_readme_shows_the_differences_as_they_are() -> None:
    shown = re.findall(r"```diff\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.S)
    before = (QUICKSTART / "train.py").read_text().splitlines()
    for framework, text in zip(ALL, shown, strict=True):
        changed = list(difflib.unified_diff(before, framework.script.read_text().splitlines(), n=0, lineterm=""))[2:]
        assert text.splitlines() == changed, framework.name


@HERE
def test_two_ranks_that_are_resumed_go_on_exactly(framework: Framework, tmp_path: Path) -> None:
    """Interrupted and resumed, or not interrupted: the same losses and accuracies; and all of each checkpoint."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    printed = train(framework, whole)
    assert re.search(rf"^(\[rank=0\] )?epoch {EPOCHS}/{EPOCHS}: step {EPOCHS * STEPS}, ", printed, re.M)
    check_rows(rows(whole))
    train(framework, resumed, stop_after=2)
    stopped = client.run("latest", resumed)
    assert stopped.state == "preempted" and len(stopped.checkpoints()) < EPOCHS
    train(framework, resumed)
    assert client.run("latest", resumed).state == "completed" and client.run("latest", resumed).restarts == 1
    assert rows(resumed) == rows(whole)
    run = client.run("latest", resumed)
    store = DirectoryStore(run.path / "checkpoints")
    saved = store.list()
    assert [header.steps_completed for header in saved] == [STEPS * epoch for epoch in range(1, EPOCHS + 1)]
    for header in saved:
        checkpoint = store.open(header.storage_id)
        checkpoint.check(checkpoint.manifest.files)
        assert framework.files <= set(checkpoint.manifest.files)


@HERE
def test_one_process_alone_stops_and_goes_on(framework: Framework, tmp_path: Path) -> None:
    """Without a launcher; and where the framework can, with two ranks from there on."""
    train(framework, tmp_path, ranks=1, stop_after=2)
    assert client.run("latest", tmp_path).state == "preempted"
    train(framework, tmp_path, ranks=2 if framework.resizes else 1)
    assert client.run("latest", tmp_path).restarts == 1
    check_rows(rows(tmp_path))


@HERE
def test_a_model_that_was_kept_is_trained_on(framework: Framework, tmp_path: Path) -> None:
    """``--save`` and ``--load``, as the plain script has them."""
    model = str(tmp_path / "model")
    first = train(framework, tmp_path / "first", 1, "--epochs", "1", "--save", model)
    second = train(framework, tmp_path / "second", 1, "--epochs", "2", "--load", model)
    assert f"epoch 1/1: step {STEPS}, " in first
    assert f"epoch 2/2: step {2 * STEPS}, " in second and "epoch 1/2" not in second


@pytest.fixture
def person(home: Path, tmp_path: Path) -> Iterator[Person]:
    """Yield a user with a machine of two slots."""
    found = Person(tmp_path)
    try:
        found.types("det-core", "master", "up", "--slots", "2")
        yield found
    finally:
        found.leaves()


@HERE
def test_a_trial_is_paused_and_goes_on(framework: Framework, person: Person) -> None:
    """The example's own configuration, with more and shorter epochs, in the framework's environment."""
    variables = {**framework.variables, "PATH": f"{Path(framework.python).parent}:{os.environ['PATH']}"}
    given = json.dumps([f"{name}={value}" for name, value in variables.items()])
    small = ["hyperparameters.width=8", "hyperparameters.batch_size=128"]
    changes = [f"searcher.max_length.epochs={framework.epochs}", *small]
    words = [word for change in changes for word in ("--config", change)]
    words += ["--config", f"environment.environment_variables={given}"]
    person.types("det-core", "experiment", "create", str(EXAMPLE / f"{framework.name}.yaml"), str(EXAMPLE), *words)
    person.watches("epoch 1/")
    person.types("det-core", "experiment", "pause", "latest")
    assert until(lambda: stopped(person)) == "PAUSED"
    assert 0 < len(reported(person)) < framework.epochs * 13
    person.types("det-core", "experiment", "activate", "latest")
    person.types("det-core", "experiment", "wait", "latest")
    check_rows(reported(person), framework.epochs, steps=12)
    (trial,) = person.reads("experiment", "describe", "latest")["trials"]
    assert trial["state"] == "COMPLETED" and trial["restarts"] == 0


def stopped(person: Person) -> str:
    """Return the experiment's state, or "" while one of its trials runs."""
    told = person.reads("experiment", "describe", "latest")
    return "" if told["state"] == "ACTIVE" or told.get("stopping_trials") else str(told["state"])


def reported(person: Person) -> list[Any]:
    """Return all rows that the trial has reported."""
    found = person.reads("trial", "metrics", "1")
    return [(row["group"], row["steps_completed"], row["metrics"]) for row in found]
