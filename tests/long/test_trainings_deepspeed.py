"""The stages of ZeRO killed twenty times, with a stop after every fourth, and with another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engine_resume import killed_and_stopped_equals_straight, resumed_with_another_number_of_ranks
from support.killed import drawn

STAGES = pytest.mark.parametrize("kind", ["zero0", "zero2", "zero3"])


@STAGES
def test_killed_20_times_and_stopped(tmp_path: Path, kind: str) -> None:
    killed_and_stopped_equals_straight(tmp_path, kind, drawn(), kills=4, rounds=5)


@STAGES
def test_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    resumed_with_another_number_of_ranks(tmp_path, kind)
