"""Halving against the plain rules, ten thousand times."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from fast.search.test_against_the_plain_rules import RUNS, compare


@settings(max_examples=10_000, derandomize=False)
@RUNS
def test_halving_for_any_trials_decides_by_the_rules(**run: Any) -> None:
    compare(**run)
