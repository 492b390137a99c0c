"""Whom the token of an allocation belongs to. Each request asks: what was found is kept while the allocation lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core.master.service._views import TokenView
from det_core.master.store import tokens

if TYPE_CHECKING:
    from det_core.master.service._state import ServiceState

MOST = 1000
"""Identities after which those of allocations that have ended are forgotten."""


async def identify(hub: ServiceState, token: str) -> TokenView | None:
    """Whom a token belongs to; None if it is none, or its allocation has ended.

    What is kept counts only as long as the allocation is among those that live: its token is revoked at its end.
    """
    known = hub.identities.get(token)
    if known is not None and known["allocation_id"] in hub.live.allocations:
        return known
    row = await hub.store.read(lambda conn: tokens.find(conn, token))
    if row is None or row.allocation_id is None or row.trial_id is None or row.experiment_id is None:
        hub.identities.pop(token, None)
        return None
    found = TokenView(
        allocation_id=row.allocation_id,
        task_id=row.allocation_id.rpartition(".")[0],
        trial_id=row.trial_id,
        experiment_id=row.experiment_id,
    )
    if len(hub.identities) >= MOST:
        hub.identities = {t: i for t, i in hub.identities.items() if i["allocation_id"] in hub.live.allocations}
    hub.identities[token] = found
    return found
