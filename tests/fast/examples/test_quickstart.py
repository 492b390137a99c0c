"""The quickstart as a new user meets it: the size of the difference, and the plain script."""

from __future__ import annotations

import difflib
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from support import EXAMPLES
from support.ranks import watched

if not find_spec("torch") or not find_spec("sklearn"):  # nothing of them is imported here, which takes seconds
    pytest.skip("the quickstart needs torch and scikit-learn", allow_module_level=True)

QUICKSTART = EXAMPLES / "quickstart"
PLAIN, TRAIN = (QUICKSTART / name for name in ("train_plain.py", "train.py"))
FAST = ["--width", "8"]


def changed_lines() -> list[str]:
    before, after = PLAIN.read_text().splitlines(), TRAIN.read_text().splitlines()
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@")]


def test_the_difference_is_at_most_25_lines() -> None:
    changed = changed_lines()
    assert 10 < len(changed) <= 25
    for part in ("report_training_metrics", "store_path", "should_preempt", "searcher.operations", "restore_path"):
        assert any(part in line for line in changed)


def test_the_readme_shows_the_difference_as_it_is() -> None:
    shown = re.search(r"```diff\n(.*?)```", (QUICKSTART / "README.md").read_text(), re.S)
    assert shown is not None
    assert [line for line in shown[1].splitlines() if not line.startswith("@@")] == changed_lines()


def test_the_plain_script_trains_saves_and_loads(tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    for load, epochs, expected in (
        ([], "1", "epoch 1/1: step 45"),
        (["--load", str(model)], "2", "epoch 2/2: step 90"),
    ):
        printed = watched([PLAIN, *FAST, "--epochs", epochs, "--save", str(model), *load], env=os.environ)
        assert [expected] == [line.partition(",")[0] for line in printed.splitlines()]
