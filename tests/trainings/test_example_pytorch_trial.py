"""The digits as a trial, as the example's README tells it: by commands, in a copy of its folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import EXAMPLES
from support.person import Person

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLE = EXAMPLES / "pytorch_trial"
README = (EXAMPLE / "README.md").read_text()
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    ") and "pip install" not in line]
SHORTER = {
    "const.yaml": {"epochs: 10": "epochs: 2"}, "grid.yaml": {"count: 4": "count: 2", "epochs: 2": "epochs: 1"},
    "asha.yaml": {"max_trials: 8": "max_trials: 3", "max_length: {epochs: 8}": "max_length: {epochs: 4}"},
}  # fmt: skip
"""Smaller figures for the files of the copy, since the commands are the subject here."""


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    shutil.copytree(EXAMPLE, tmp_path / "trial", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in SHORTER.items():
        shorten(tmp_path / "trial" / name, changes)
    somebody = Person(tmp_path / "trial")
    yield somebody
    somebody.leaves()


def shorten(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)


def accuracy(text: str) -> float:
    return float(re.findall(r"accuracy (\d\.\d+)", text)[-1])


def test_every_command_of_the_readme(person: Person) -> None:
    assert len(COMMANDS) == 12
    commands = [command for command in COMMANDS if not command.startswith("cd ")]
    plain = accuracy(person.types("python", commands.pop(0).split()[1]).stdout)
    for command in commands:
        words, variables = command.split(), {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        done = person.types(*words, **variables)
        if "train.py" in words or "const.yaml" in command:
            assert "completed" in done.stderr
        if words[1:] == ["train.py"] and not variables:
            exported = person.types("det-core", "runs", "export", "latest", "--format", "jsonl").stdout
            best = max(float(found) for found in re.findall(r'"accuracy":(\d\.\d+)', exported))
            assert best == pytest.approx(plain, abs=0.02) and best > 0.95
        if variables:  # the run to its end was resumed; the next one need not be as long
            shorten(person.folder / "train.py", {"Epoch(10)": "Epoch(2)"})
        if "--follow" in words:
            assert "COMPLETED" in done.stdout + done.stderr
    assert accuracy(done.stdout) > 0.9
