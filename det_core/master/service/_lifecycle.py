"""Start and stop of the service."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from det_core.master.service._actor import Actor
from det_core.master.service._allocations import schedule
from det_core.master.service._listener import EventListener
from det_core.master.service._live import Launch
from det_core.master.service._recovery import reload, resume
from det_core.master.service._runner import Runner
from det_core.master.service._search import settle
from det_core.master.store import trials

if TYPE_CHECKING:
    from det_core.master.service._state import ServiceState


async def start(service: ServiceState) -> None:
    """Read the store, adopt the allocations that still run, and continue what an earlier master did not finish."""
    service.runner = Runner(service)
    service.actor = Actor(
        service.store,
        partial(settle, service),
        partial(schedule, service),
        partial(reload, service),
        service.subscriptions.publish,
    )
    await reload(service)
    rows, kept = await service.store.read(
        lambda session: (trials.running_allocations(session), trials.last_runs(session))
    )
    known = {row.id: Launch.from_facts(row.facts).ref for row in rows}
    service.actor.start()
    await service.engine.recover(known, EventListener(service), kept)
    service.runner.watch()
    await resume(service)


async def stop(service: ServiceState) -> None:
    """Decide nothing more; allocations go on, and the next :func:`start` finds them."""
    await service.actor.stop()
    service.subscriptions.close()
    await service.runner.stop()
    for worker in list(service.workers.values()):  # those whose tasks were given up before their processes were gone
        await worker.close()
    for threads in (service.log_readers, service.log_writer):
        await asyncio.to_thread(threads.shutdown)
