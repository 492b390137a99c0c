"""The local engine passes the suite for engines."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from det_core.master.engines import Cause, Engine, LocalEngine, Slots
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._watch import find_processes
from support.engine_suite import FOREVER, EngineSuite, key, spec


class TestLocalEngine(EngineSuite):
    def make_engine(self, home: Path, slots: int) -> Engine:
        return LocalEngine(home, Slots(slots))

    def test_folder_removed_while_it_runs_ends_it_and_blocks_no_other(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("gone", f"echo began; {FOREVER}"))
                while not bench.lines("gone"):
                    await asyncio.sleep(0.01)
                folder = tmp_path / "home" / "master" / "allocations" / key("gone")
                shutil.rmtree(folder)
                await bench.engine.launch(spec("next", "exit 0"))
                assert (await bench.end_of("next")).status == 0
                report = await bench.end_of("gone")
                assert report.cause is Cause.LOST
                assert find_processes(AllocationFolder(folder)) == set(), "no process of it is left"

        self.run(work())

    def test_flood_of_lines_keeps_neither_its_kill_nor_the_next_waiting(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("flood", "exec yes"))
                log = tmp_path / "home" / "master" / "allocations" / key("flood") / "log"
                while sum(path.stat().st_size for path in log.glob("*")) < 80 << 20:
                    await asyncio.sleep(0.01)
                await bench.engine.kill(key("flood"))
                await bench.engine.launch(spec("next", "exit 0"))
                assert (await bench.end_of("next")).status == 0
                report = await bench.end_of("flood")
                assert report.cause is Cause.CANCELLED
                assert set(report.last_lines) == {"y"}, "the log is whole, and nobody has read it"

        self.run(work())
