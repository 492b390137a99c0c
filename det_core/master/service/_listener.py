"""Listener for what an engine hands over: the journals that processes left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from det_core.master.service import _reports, _tickets

if TYPE_CHECKING:
    from det_core.master.engines import Claim
    from det_core.master.service._state import ServiceState


class EventListener:
    """Takes it into the store.

    Args:
        service: State of the service.
    """

    def __init__(self, service: ServiceState) -> None:
        self._service = service

    async def claim(self, allocation_id: str, node: int, code: str, runner: str) -> Claim:
        """Give credentials to whoever is about to run an allocation."""
        return await _tickets.claim(self._service, allocation_id, node, code, runner)

    async def open_context(self, digest: str) -> IO[bytes]:
        """Open a context archive."""
        return await _tickets.open_context(self._service, digest)

    async def deliver(
        self,
        allocation_id: str,
        node: int,
        token: str,
        name: str,
        data: bytes,
        *,
        offset: int = 0,
        digest: str | None = None,
    ) -> int:
        """Take a piece of a file."""
        return await _tickets.deliver(
            self._service, allocation_id, node, token, name, data, offset=offset, digest=digest
        )

    async def journal(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take what a dead process left in its journal."""
        allocation = self._service.live.allocations.get(allocation_id)
        if allocation is not None:
            await _reports.left_behind(self._service, allocation, rank, records, restart)

    async def reports(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take what a process that lives has reported while no master was there."""
        allocation = self._service.live.allocations.get(allocation_id)
        if allocation is not None:
            await _reports.journal(self._service, allocation.trial.id, allocation.run_id, rank, records, restart)
