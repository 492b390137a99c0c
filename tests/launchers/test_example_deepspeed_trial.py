"""The digits by DeepSpeed, as the example's README tells it: by commands, in a copy of its folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import EXAMPLES, warm
from support.frameworks import WARM, variables
from support.person import Person

EXAMPLE = EXAMPLES / "deepspeed_trial"
README = (EXAMPLE / "README.md").read_text()
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    ") and "pip install" not in line]


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """Yield a user who has activated the venv with DeepSpeed, whose ``python`` is warm."""
    folder = tmp_path / "trial"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shorten(4, folder / "train.py", folder / "pipeline.yaml")  # it has learned by then
    somebody = Person(folder)
    somebody.environment.update(variables())
    somebody.environment["PATH"] = f"{Path(warm.python(WARM)).parent}:{somebody.environment['PATH']}"
    yield somebody
    somebody.leaves()


def shorten(epochs: int, *files: Path) -> None:
    for file in files:
        text, count = re.subn(r"(max_length\D+)\d+", rf"\g<1>{epochs}", file.read_text())
        assert count == 1, file
        file.write_text(text)


def test_every_command_of_the_readme(person: Person) -> None:
    assert len(COMMANDS) == 9 and COMMANDS[0].startswith("cd ")
    for command in COMMANDS[1:]:
        words, given = command.split(), {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        if words[1] == "master":
            shorten(1, person.folder / "const.yaml", person.folder / "pipeline.yaml")
        done = person.types(*words, **given)
        said = done.stdout + done.stderr
        if "python" in words:
            assert "completed" in said
            assert ("started again (restart 1)" in said) is bool(given)
            exported = person.types("det-core", "runs", "export", "latest", "--format", "jsonl").stdout
            if "pipeline_def:DigitsPipeline" in words:
                assert min(float(found) for found in re.findall(r'"validation_loss":(\d\.\d+)', exported)) < 0.15
            else:
                assert max(float(found) for found in re.findall(r'"accuracy":(\d\.\d+)', exported)) > 0.95
        if "--follow" in words:
            assert "COMPLETED" in said
