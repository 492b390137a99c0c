"""The master dies at each of its commits, before it or after it, and another one goes on from the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.crashes import die_at


@pytest.mark.parametrize("slots", [1, 2])
def test_death_at_some_commits(tmp_path: Path, slots: int) -> None:
    asyncio.run(die_at(tmp_path, slots, range(slots, 1000, 23)))
