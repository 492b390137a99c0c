"""The digits by DeepSpeed, as the example's README tells it: by commands, in a copy of its folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import EXAMPLES
from support.frameworks import need, variables
from support.person import Person

EXAMPLE = EXAMPLES / "deepspeed_trial"
README = (EXAMPLE / "README.md").read_text()
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    ") and "pip install" not in line]


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    need()
    shutil.copytree(EXAMPLE, tmp_path / "trial", ignore=shutil.ignore_patterns("__pycache__"))
    config = tmp_path / "trial" / "const.yaml"
    config.write_text(
        config.read_text().replace("epochs: 10", "epochs: 2")
    )  # the command is tried, and train.py learns
    somebody = Person(tmp_path / "trial")
    somebody.environment.update(variables())  # whoever has activated the venv with DeepSpeed
    yield somebody
    somebody.leaves()


def test_every_command_of_the_readme(person: Person) -> None:
    assert len(COMMANDS) == 9 and COMMANDS[0].startswith("cd ")
    for command in COMMANDS[1:]:
        words, given = command.split(), {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        done = person.types(*words, **given)
        said = done.stdout + done.stderr
        if "python" in words:
            assert "completed" in said
            assert ("resumed (restart 1)" in said) is bool(given)
            exported = person.types("det-core", "runs", "export", "latest", "--format", "jsonl").stdout
            if "pipeline_def:DigitsPipeline" in words:
                assert min(float(found) for found in re.findall(r'"validation_loss":(\d\.\d+)', exported)) < 0.15
            else:
                assert max(float(found) for found in re.findall(r'"accuracy":(\d\.\d+)', exported)) > 0.95
        if "--follow" in words:
            assert "COMPLETED" in said
