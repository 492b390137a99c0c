"""The digits by the accelerated Trainer, as the example's README tells it: by commands, in a copy of its folder."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import EXAMPLES
from support.person import Person
from support.ranks import watched

torch = pytest.importorskip("torch")
for needed in ("sklearn", "torchmetrics", "accelerate"):
    pytest.importorskip(needed)

EXAMPLE = EXAMPLES / "accelerated"
README = (EXAMPLE / "README.md").read_text()
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    ") and "pip install" not in line]
SHORTER = {
    "grid.yaml": {"count: 4": "count: 2", "epochs: 2": "epochs: 1"},
    "asha.yaml": {"max_trials: 8": "max_trials: 2", "max_length: {epochs: 8}": "max_length: {epochs: 2}"},
}
"""Smaller figures for the files of the copy, since the commands are the subject here."""
LAUNCHER = [sys.executable, "-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2"]


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    shutil.copytree(EXAMPLE, tmp_path / "digits", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in SHORTER.items():
        text = (tmp_path / "digits" / name).read_text()
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        (tmp_path / "digits" / name).write_text(text)
    somebody = Person(tmp_path / "digits")
    yield somebody
    somebody.leaves()


def last(text: str, metric: str) -> float:
    return float(re.findall(rf"\b{metric}: (\d\.\d+)", text)[-1])


def trains(person: Person, script: str, at: str | None = None) -> str:
    """Run a script in one process, and press Ctrl-C when it says something for the first time; what it said."""
    said = watched([script], env=person.environment, cwd=person.folder, at=at, number=signal.SIGINT)
    assert at is None or "preempted; to resume it" in said, said
    return said


def interrupted(person: Person, command: list[str], at: str) -> None:
    """Run a command, and press Ctrl-C when it prints ``at`` for the first time."""
    said, sent = "", False
    with subprocess.Popen(
        command, cwd=person.folder, env=person.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if at in line and not sent:
                process.send_signal(signal.SIGINT)
                sent = True
    assert process.returncode == 0 and "preempted; to resume it" in said, said


def run(person: Person) -> tuple[list[tuple[int, float]], list[int]]:
    """Return the validation accuracies of the newest run by their steps, and the steps with training metrics."""
    text = person.types("det-core", "runs", "export", "latest", "--format", "jsonl").stdout
    rows = [json.loads(line) for line in text.splitlines()]
    validation = [(row["steps_completed"], row["metrics"]) for row in rows if row["group"] == "validation"]
    return (
        [(step, metrics["eval_accuracy"]) for step, metrics in validation],
        [row["steps_completed"] for row in rows if row["group"] == "training"],
    )


def test_it_is_fifteen_lines() -> None:
    body = (EXAMPLE / "train.py").read_text().split('"__main__":\n')[1]
    assert len(body.splitlines()) <= 15


def test_every_command_of_the_readme(person: Person) -> None:
    assert len(COMMANDS) == 9
    for command in COMMANDS:
        words = command.split()
        if words[0] == "cd":
            continue
        done = person.types(*words)
        if "train.py" in words:
            assert "completed" in done.stderr and last(done.stdout, "eval_accuracy") > 0.95
            assert (person.folder / "digits.pt").exists()
        if "finetune.py" in words:
            assert last(done.stdout, "ema_model_eval_accuracy") > 0.95
            assert set(torch.load(person.folder / "odd_or_even.pt", weights_only=True)) >= {"model_state_dict", "epoch"}
        if "--follow" in words:
            assert "COMPLETED" in done.stdout + done.stderr
    assert (person.folder / "model" / "state.pt").exists()


def test_an_interrupted_training_goes_on_exactly_on_two_ranks(person: Person) -> None:
    script = person.folder / "train.py"
    assert "train_set, 10," in script.read_text()
    script.write_text(script.read_text().replace("train_set, 10,", "train_set, 4,"))
    command = [*LAUNCHER, "train.py"]
    person.types(*command)
    straight, model = run(person), torch.load(person.folder / "digits.pt", weights_only=True)["model_state_dict"]
    person.types("det-core", "runs", "rm", "latest", "--yes")
    (person.folder / "digits.pt").unlink()
    interrupted(person, command, "Starting epoch 3")
    assert not (person.folder / "digits.pt").exists()
    assert "Resumed at batch" in person.types(*command).stdout
    assert run(person) == straight and [step for step, _ in straight[0]] == list(range(45, 181, 45))
    again = torch.load(person.folder / "digits.pt", weights_only=True)["model_state_dict"]
    assert all(torch.equal(again[name], model[name]) for name in model)


def test_an_interrupted_fine_tuning_goes_on_exactly_in_either_training(person: Person) -> None:
    trains(person, "train.py")
    trains(person, "finetune.py")
    straight, best = run(person), torch.load(person.folder / "odd_or_even.pt", weights_only=True)
    person.types("det-core", "runs", "rm", "latest", "--yes")
    (person.folder / "odd_or_even.pt").unlink()
    trains(person, "finetune.py", at="Starting epoch 2")
    trains(person, "finetune.py", at="Starting epoch 5")
    said = trains(person, "finetune.py")
    assert "had ended before" in said and "Resumed at batch" in said
    assert run(person) == straight and [step for step, _ in straight[0]] == list(range(45, 271, 45))
    again = torch.load(person.folder / "odd_or_even.pt", weights_only=True)
    assert again["ema_model_eval_loss_epoch"] == best["ema_model_eval_loss_epoch"]
    models = [found["model_state_dict"] for found in (again, best)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
