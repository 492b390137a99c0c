"""The loop of docs/core-api.md, killed ten times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from trainings.test_exact_loop import kills


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_resumes_exactly_after_ten_kills(tmp_path: Path, ranks: int) -> None:
    kills(tmp_path, ranks, 10, seed=random.randrange(10**6))
