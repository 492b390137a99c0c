"""What the processes of an allocation ask about each other (§6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core.master.service._access import live_allocation
from det_core.master.service._signalled import know_allocation
from det_core.master.service._views import RendezvousView
from det_core.master.store import allocations

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from det_core.master.service._hub import Hub
    from det_core.master.service._live import LiveAllocation


async def _running(hub: Hub, allocation_id: str) -> LiveAllocation:
    """An allocation that has not ended.

    Raises:
        NotFound: there never was one of that id.
        Fenced: it has ended.
    """
    await know_allocation(hub, allocation_id)
    return live_allocation(hub, allocation_id)


async def rendezvous(hub: Hub, allocation_id: str, resources_id: str) -> RendezvousView:
    """Where the peers are. All processes of this engine's allocations are on one machine, under one container."""
    found = await _running(hub, allocation_id)
    return RendezvousView(addresses=["127.0.0.1"], rank=0, slots=[len(found.slot_ids)])


async def gather(
    hub: Hub, allocation_id: str, name: str, request: str, peers: int, data: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Meet at a barrier."""
    await _running(hub, allocation_id)
    return await hub.gatherings.meet(allocation_id, name, request, peers, data)


async def note(hub: Hub, allocation_id: str, **facts: Any) -> None:
    """Note facts of an allocation; lists grow, other values are replaced."""
    await _running(hub, allocation_id)

    def write(conn: Connection) -> None:
        row = allocations.get(conn, allocation_id)
        if row is None:
            return
        known = dict(row.facts)
        for name, value in facts.items():
            if isinstance(value, list):
                value = sorted({*known.get(name, []), *value})
            known[name] = value
        allocations.change(conn, allocation_id, facts=known, ready=bool(known.get("ready", row.ready)))

    await hub.store.write(write)
