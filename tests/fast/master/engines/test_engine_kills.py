"""kill -9 at random moments: every allocation ends once, leaves no process, and no line is missing or there twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engine_kills import kill_at_random


@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, seed)
