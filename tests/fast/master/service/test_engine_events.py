"""Words of an engine about allocations: queued in a cluster, started there, soon to be ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core.master.engines import Moved, Notice, Ticket
from det_core.master.scheduler import Phase
from det_core.master.service import _checkpoints, _queries, _tickets
from det_core.master.store import models
from support.mastered import Bench, bench, train
from support.scripted_trials import Trial

SINGLE = {"name": "single", "max_length": 2}


async def state(b: Bench, wanted: str) -> None:
    """Wait until the trial is shown in a state."""
    while (await _queries.trial(b.service, 1)).state != wanted:
        await asyncio.sleep(0.001)


async def test_moves_are_shown_and_kept_over_the_death_of_the_master(tmp_path: Path) -> None:
    known: list[Mapping[str, str | None]] = []

    async def recover(found: Mapping[str, str | None], *_: object) -> None:
        known.append(found)

    async with bench(tmp_path, train) as b:
        tickets: asyncio.Queue[Ticket] = asyncio.Queue()
        engine: Any = b.engine
        engine.launch = tickets.put
        engine.recover = recover
        await b.create(SINGLE)
        ticket = await tickets.get()
        b.engine.tell(Moved("1.unknown.1", Phase.QUEUED, ref="job 1"))
        b.engine.tell(Moved(ticket.allocation_id, Phase.QUEUED, "job 7: Priority", "job 7"))
        await state(b, "QUEUED")
        storage = await _checkpoints.prepare_run(b.service, 1, {"type": "directory", "container_path": "/mnt/a"})
        b.engine.tell(Moved(ticket.allocation_id, Phase.STARTING, "0 of 2 nodes", nodes=2))
        await state(b, "STARTING")
        await b.die()
        await b.start()
        assert known == [{ticket.allocation_id: "job 7"}]
        for node in range(2):
            await state(b, "STARTING")
            await _tickets.EventListener(b.service).claim(ticket.allocation_id, node, ticket.code, f"runner {node}")
        await state(b, "RUNNING")
        row = await b.store.read(lambda session: session.get(models.Allocation, ticket.allocation_id))
        assert row is not None and row.facts["storage_id"] == storage, "a move does not forget it"


async def test_notice_has_a_trial_save_and_run_again(tmp_path: Path) -> None:
    async def script(trial: Trial) -> int:
        if trial.spec.trial_run_id > 1:
            return await train(trial)
        trial.engine.tell(Notice("1.unknown.1", "its time limit is near", 60.0))
        trial.engine.tell(Notice(trial.spec.allocation_id, "its time limit is near", 60.0))
        assert await trial.should_preempt(60)
        await trial.checkpoint(1)
        await trial.acknowledge()
        return 0

    async with bench(tmp_path, script) as b:
        number = await b.create(SINGLE, max_restarts=0)
        assert await b.ended(number) == "COMPLETED"
        assert [ticket.steps_completed for ticket in b.engine.launched] == [0, 1]
