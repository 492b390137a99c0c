"""The quickstart, killed ten times at random moments, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.killed import drawn
from trainings.test_quickstart import Witnessed, kill_again_and_again


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_reported_and_stored_survives_kill_9_at_ten_random_moments(tmp_path: Path, ranks: int) -> None:
    kill_again_and_again(Witnessed(tmp_path, ranks, epochs=40), 10, drawn())
