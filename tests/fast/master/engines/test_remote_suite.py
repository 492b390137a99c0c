"""An engine that does not share the master's folders passes the suite for engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from det_core.master.engines import Engine, Notice
from support.engine_suite import FOREVER, EngineSuite, key, spec, until
from support.remote_engine import RemoteEngine


class TestRemoteEngine(EngineSuite):
    time_limit: float | None = None

    def make_engine(self, home: Path, slots: int) -> Engine:
        return RemoteEngine(home, home.parent / "elsewhere", slots, time_limit=self.time_limit)

    def test_time_limit_is_announced_as_early_as_the_ticket_wants(self, tmp_path: Path) -> None:
        async def work() -> None:
            self.time_limit = 1000.0
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(replace(spec("late"), stop_before=10.0))
                await bench.engine.launch(replace(spec("soon", FOREVER), stop_before=999.9))
                await until(lambda: any(isinstance(event, Notice) for event in bench.moves))
                (notice,) = [event for event in bench.moves if isinstance(event, Notice)]
                assert (notice.allocation_id, notice.seconds) == (key("soon"), 999.9)
                await bench.engine.kill(key("soon"))
                await bench.end_of("soon")

        self.run(work())
