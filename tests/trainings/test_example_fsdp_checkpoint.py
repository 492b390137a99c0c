"""The FSDP example: interrupted and resumed it trains on bit by bit, also with another number of ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from det_core import client
from det_core.storage import DirectoryStore
from support import EXAMPLES
from support.ranks import watched

pytest.importorskip("torch")

EXAMPLE = EXAMPLES / "fsdp_checkpoint"
OPTIONS = ["--steps", "12", "--save-every", "4", "--batch-size", "16"]


def train(home: Path, ranks: int = 2, *, stop_at: int | None = None) -> str:
    """Train, or resume, with a SIGTERM after step ``stop_at``; return the output."""
    environment = {**os.environ, "DET_CORE_HOME": str(home), "DET_CORE_RESUME": "latest"}
    at = None if stop_at is None else f"step {stop_at}/"
    return watched([EXAMPLE / "train.py", *OPTIONS], ranks, env=environment, at=at)


def losses(home: Path) -> list[Any]:
    return [(row.steps_completed, row.metrics) for row in client.run("latest", home).rows("training")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home directory of a training that was not interrupted, on two ranks."""
    home = tmp_path_factory.mktemp("whole")
    train(home)
    return home


def test_each_checkpoint_is_all_there(whole: Path) -> None:
    assert [step for step, _ in losses(whole)] == list(range(1, 13))
    store = DirectoryStore(client.run("latest", whole).path / "checkpoints")
    saved = store.list()
    assert [header.steps_completed for header in saved] == [4, 8, 12]
    for header in saved:
        checkpoint = store.open(header.storage_id)
        checkpoint.check(checkpoint.manifest.files)
        assert {".metadata", "__0_0.distcp", "__1_0.distcp"} < set(checkpoint.manifest.files)


def test_a_resumed_training_goes_on_exactly(whole: Path, tmp_path: Path) -> None:
    train(tmp_path, stop_at=5)
    assert client.run("latest", tmp_path).state == "preempted" and 5 <= len(losses(tmp_path)) < 12
    train(tmp_path)
    assert losses(tmp_path) == losses(whole)


def test_it_goes_on_with_another_number_of_ranks(whole: Path, tmp_path: Path) -> None:
    """Each rank gets other shards; the sums over the ranks are rounded otherwise, and no more."""
    train(tmp_path, stop_at=4)
    done = len(losses(tmp_path))
    printed = train(tmp_path, ranks=1)
    assert f"step {done + 1}/12" in printed and f"step {done}/12" not in printed
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 13))
    for (_, found), (_, expected) in zip(losses(tmp_path), losses(whole), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_what_the_readme_shows_is_what_the_script_does() -> None:
    script = re.sub(r"\s+", " ", (EXAMPLE / "train.py").read_text()).replace("self.", "")
    shown = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.S)
    assert len(shown) == 3
    for line in (shown[0] + shown[2]).splitlines():
        code = line.partition("#")[0].strip().replace("(state,", "(state(),").replace("load(state()", "load(state")
        assert code in script, line
