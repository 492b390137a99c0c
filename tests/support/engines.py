"""A local engine for tests, with somebody who listens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from det_core.master.engines import Engine, LocalEngine, Slots
from support.engine_suite import EngineSuite


class Local(EngineSuite):
    """Engine suite for its ``bench`` alone; the inherited tests run elsewhere."""

    __test__ = False

    def __init__(self, **options: Any) -> None:
        self.options = options

    def make_engine(self, home: Path, slots: int) -> Engine:
        return LocalEngine(home, Slots(slots), **self.options)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's work, for a minute and a half at most."""
    asyncio.run(asyncio.wait_for(work, 90))


def texts(bench: Any, allocation_id: str) -> list[str]:
    """Return the log lines of an allocation."""
    return [line.text for line in bench.lines(allocation_id[2:-2])]
