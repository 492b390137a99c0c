"""Requests of an allocation's own processes: preemption (§5.6) and rendezvous (§6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from det_core import _clock
from det_core.master._errors import NotFound
from det_core.master.service import _allocations
from det_core.master.service._access import live_allocation
from det_core.master.service._views import RendezvousView
from det_core.master.store import models

if TYPE_CHECKING:
    from det_core.master.service._actor import Transaction
    from det_core.master.service._state import ServiceState

UNKNOWN_PAUSE = 1.0
"""Seconds that somebody waits for the answer that an allocation does not exist, lest it asks again at once."""


async def poll(service: ServiceState, allocation_id: str, timeout: float) -> bool:
    """Return whether an allocation is to stop, as soon as it is, or after ``timeout`` seconds.

    A poll during which the allocation ends returns True, a later one False: stock clients poll in a loop.

    Raises:
        NotFound: If no allocation has this ID.
    """
    allocation = service.live.allocations.get(allocation_id)
    if allocation is None:
        await know_allocation(service, allocation_id)
        return False
    until = _clock.monotonic() + timeout
    while allocation is not None and not allocation.is_preempted:
        cursor = service.subscriptions.cursor
        if not await service.subscriptions.wait(("allocation", allocation_id), cursor, until - _clock.monotonic()):
            return False
        allocation = service.live.allocations.get(allocation_id)
    return True


async def know_allocation(service: ServiceState, allocation_id: str) -> None:
    """Make sure that there is, or was, such an allocation.

    Raises:
        NotFound: there never was.
    """
    if allocation_id in service.live.allocations:
        return
    row = await service.store.read(lambda session: session.get(models.Allocation, allocation_id))
    if row is None:
        await asyncio.sleep(UNKNOWN_PAUSE)
        raise NotFound(f"allocation {allocation_id} not found")


async def acknowledge(service: ServiceState, allocation_id: str) -> None:
    """Note that the process of an allocation has noticed its preemption and is about to exit."""
    await know_allocation(service, allocation_id)

    def command(tx: Transaction) -> None:
        _allocations.acknowledge(service, tx, live_allocation(service, allocation_id))

    await service.actor.do(command)


async def pending(service: ServiceState, allocation_id: str) -> None:
    """Have an allocation save and stop because its machine is wanted back; its trial runs again elsewhere."""
    await know_allocation(service, allocation_id)

    def command(tx: Transaction) -> None:
        _allocations.ask_to_stop(service, tx, live_allocation(service, allocation_id), "its machine is wanted back")

    await service.actor.do(command)


async def rendezvous(service: ServiceState, allocation_id: str) -> RendezvousView:
    """Return the addresses of an allocation's containers: one, because the engine runs it on this machine.

    Raises:
        NotFound: If no allocation has this ID.
        Fenced: If it has ended.
    """
    await know_allocation(service, allocation_id)
    allocation = live_allocation(service, allocation_id)
    return RendezvousView(addresses=["127.0.0.1"], rank=0, slots=[allocation.slots])
