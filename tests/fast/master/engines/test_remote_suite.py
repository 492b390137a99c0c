"""An engine that does not share the master's folders passes the suite for engines."""

from __future__ import annotations

from pathlib import Path

from det_core.master.engines import Engine
from support.engine_suite import EngineSuite
from support.remote_engine import RemoteEngine


class TestRemoteEngine(EngineSuite):
    def make_engine(self, home: Path, slots: int) -> Engine:
        return RemoteEngine(home, home.parent / "elsewhere", slots)
