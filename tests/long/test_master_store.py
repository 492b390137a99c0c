"""The master's store: kill -9 by the hundred, and rows made up by the thousand."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from sqlalchemy import Engine

from fast.master.store.conftest import empty_url, scratch
from support import journal_series as journal
from support import reported_series as reported
from support.store_kills import kill_and_look

__all__ = ["empty_url", "scratch"]


def test_what_was_answered_survives_200_kills(empty_url: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kill_and_look(empty_url, 200, seed)


@settings(max_examples=1000, derandomize=False)
@given(**journal.CASES)
def test_the_series_are_those_of_the_journals_own_reader(
    scratch: Engine, runs: Any, by_restart: bool, seed: int
) -> None:
    journal.check(scratch, runs, by_restart, seed)


@settings(max_examples=1000, derandomize=False)
@given(reports=reported.REPORTS)
def test_it_does_as_the_contract_says(scratch: Engine, reports: Any) -> None:
    reported.check(scratch, reports)
