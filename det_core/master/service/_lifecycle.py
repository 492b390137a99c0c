"""Start and stop of the service."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from det_core.master.service._actor import Actor
from det_core.master.service._allocations import schedule
from det_core.master.service._listener import Ear
from det_core.master.service._live import Launch
from det_core.master.service._recovery import reload, resume
from det_core.master.service._runner import Runner
from det_core.master.service._search import settle
from det_core.master.store import trials

if TYPE_CHECKING:
    from det_core.master.service._state import ServiceState


async def start(hub: ServiceState) -> None:
    """Read the store, adopt the allocations that still run, and continue what an earlier master did not finish."""
    hub.runner = Runner(hub)
    hub.actor = Actor(
        hub.store, partial(settle, hub), partial(schedule, hub), partial(reload, hub), hub.subscriptions.publish
    )
    await reload(hub)
    rows, kept = await hub.store.read(lambda session: (trials.running_allocations(session), trials.last_runs(session)))
    known = {row.id: Launch.from_facts(row.facts).ref for row in rows}
    hub.actor.start()
    await hub.engine.recover(known, Ear(hub), kept)
    hub.runner.watch()
    await resume(hub)


async def stop(hub: ServiceState) -> None:
    """Decide nothing more; allocations go on, and the next :func:`start` finds them."""
    await hub.actor.stop()
    hub.subscriptions.close()
    await hub.runner.stop()
    for worker in list(hub.workers.values()):  # those whose tasks were given up before their processes were gone
        await worker.close()
    for threads in (hub.log_readers, hub.log_writer):
        await asyncio.to_thread(threads.shutdown)
