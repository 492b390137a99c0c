"""The local engine passes the suite for engines."""

from __future__ import annotations

from pathlib import Path

from det_core.master.engines import Engine, LocalEngine, Slots
from support.engine_suite import EngineSuite


class TestLocalEngine(EngineSuite):
    def make_engine(self, home: Path, slots: int) -> Engine:
        return LocalEngine(home, Slots(slots))
