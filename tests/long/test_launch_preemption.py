"""SIGTERM to a launcher at a hundred moments."""

from __future__ import annotations

import random
from pathlib import Path

from fast.launch.test_det_core_script import stop_at_any_moment


def test_sigterm_at_any_moment_stops_all_ranks_at_the_same_call(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    stop_at_any_moment(tmp_path, random.Random(seed), times=100)
