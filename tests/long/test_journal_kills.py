"""A hundred writers are killed, and lose no report whose call returned."""

from __future__ import annotations

import random
from pathlib import Path

from fast.journal.test_journal_read import kill_once
from support.journals import written


def test_hundred_kills_lose_no_returned_report(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    for number in range(100):
        kill_once(tmp_path / str(number // 5), number % 5, chosen.randrange(1, 2000))
        found = written(tmp_path / str(number // 5))
        assert list(found) == list(range(1, len(found) + 1))
