"""Launcher and supervisor ended at random moments, a hundred and twenty times."""

from __future__ import annotations

import random
from pathlib import Path

from fast.launch.test_supervision import kill_at_any_moment


def test_nothing_outlives_a_kill_at_any_moment(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    kill_at_any_moment(tmp_path, random.Random(seed), times=120)
