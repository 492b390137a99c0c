"""DeepSpeed's trials stopped, killed, and started again: to the last bit, or on another number of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.engine_resume import (
    SCRIPT,
    killed_and_stopped_equals_straight,
    resumed_with_another_number_of_ranks,
    script,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["zero1", "pipe"])
def test_killed_and_stopped_equals_straight(tmp_path: Path, kind: str) -> None:
    """The other stages of ZeRO are killed in ``tests/long``."""
    killed_and_stopped_equals_straight(tmp_path, kind, random.Random(1), cold=False)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    resumed_with_another_number_of_ranks(tmp_path, "zero1", cold=False)


@pytest.mark.parametrize(("kind", "optimizer"), [("zero1", "SGD"), ("pipe", "Adam")])
def test_what_cannot_be_loaded_on_another_number_is_one_error(tmp_path: Path, kind: str, optimizer: str) -> None:
    env = {"OPTIMIZER": optimizer} if optimizer != "Adam" else {}
    found = script(tmp_path / "script", kind, cold=False, LENGTH="3", **env)
    found.finish()
    found.env["LENGTH"] = "5"
    if kind == "pipe":
        code = SCRIPT.replace("    accumulation, records", "    stages, accumulation, records").replace(
            "2, 40", "1, 2, 40"
        )
        (found.folder / "script.py").write_text(code)
    assert found.start(1).wait() == 1
    message = "cannot load a checkpoint of 2 rank(s) on 1: start 2, or start from scratch ("
    assert found.output.count(f"det_core.errors.CheckpointError: {message}") == 1, found.output
