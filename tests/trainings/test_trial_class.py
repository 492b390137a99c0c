"""A trial class as a program, behind the launcher and searched over."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fast.exec.test_harness import MODEL
from support.launcher import TORCH
from support.person import Person

pytest.importorskip("torch")


@pytest.fixture
def person(tmp_path: Path) -> Any:
    (tmp_path / "model_def.py").write_text(MODEL)
    somebody = Person(tmp_path)
    yield somebody
    somebody.leaves()


def test_behind_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL)
    words = ["--nproc-per-node", "2", "--trial", "model_def:Digits", "--max-length", "3", "--hparam", "lr=0.1"]
    for between in ([], ["--"]):
        done = subprocess.run([*TORCH, *words[:2], *between, *words[2:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "completed" in done.stderr, done.stderr


SEARCH = """
name: classes
entrypoint: model_def:Digits
hyperparameters: {lr: {type: categorical, vals: [0.01, 0.1]}}
searcher: {name: grid, metric: error, max_length: {epochs: 2}}
min_validation_period: {epochs: 1}
"""


def test_a_search_by_class(person: Any, tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text(SEARCH)
    said = person.types("det-core", "experiment", "create", "search.yaml", ".", "--follow")
    assert "COMPLETED, 2 trials" in said.stdout + said.stderr
    for old, new, message in (
        ("model_def:Digits", "model_def:Missing", "model_def:Missing needs a class Missing, and model_def.py has none"),
        ("model_def:Digits", "model_def.Digits", "is not a command; a trial class is written model_def:Digits"),
        ("model_def:Digits", "other:Digits", "other:Digits needs other.py, and there is no such file"),
    ):
        (tmp_path / "wrong.yaml").write_text(SEARCH.replace(old, new))
        refused = person.types("det-core", "experiment", "create", "wrong.yaml", ".", status=2)
        assert message in refused.stderr
