"""DeepSpeed's other stages: what is resumed is what would have been, also by another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launcher import tests_of

short = tests_of("test_deepspeed_resume")


@pytest.mark.parametrize("kind", ["zero0", "zero3"])
def test_stages_0_and_3_resume_exactly(tmp_path: Path, kind: str) -> None:
    straight, halves = short.script(tmp_path / "straight", kind), short.script(tmp_path / "halves", kind, LENGTH="8")
    straight.finish()
    halves.finish()
    halves.env["LENGTH"] = "18"
    halves.finish()
    assert short.joined(halves) == short.joined(straight)
    assert short.ends(halves) == short.ends(straight)


@pytest.mark.parametrize("kind", ["zero0", "zero2", "zero3"])
def test_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    short.test_another_number_of_ranks(tmp_path, kind)
