"""A thousand trials that finish at once."""

from __future__ import annotations

from pathlib import Path

from fast.master.test_thousand import test_trials_that_finish_at_once as check


def test_a_thousand_trials(tmp_path: Path) -> None:
    check(tmp_path, 1000)
