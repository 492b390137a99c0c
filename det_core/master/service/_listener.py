"""What allocations say to the engine: their output, and the journals that dead processes left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from det_core.master.service import _reports, _tickets
from det_core.master.service._exits import log_mark
from det_core.master.store import key_values, logs

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.engines import Claim, LogLine
    from det_core.master.service._state import ServiceState


class Ear:
    """Takes it into the store.

    Args:
        hub: the service's parts.
    """

    def __init__(self, hub: ServiceState) -> None:
        self._hub = hub

    async def logs(self, allocation_id: str, lines: Sequence[LogLine], mark: str) -> None:
        """Keep lines of output, and how far they have come."""
        task_id = allocation_id.rpartition(".")[0]
        kept = [
            logs.LogLine(
                task_id=task_id,
                log=line.text + "\n",
                timestamp=line.time,
                allocation_id=allocation_id,
                agent_id=self._hub.settings.agent_id,
                rank=line.rank,
                level=line.level or "INFO",
                stdtype=line.stream,
            )
            for line in lines
        ]

        def write(conn: Session) -> None:
            logs.append(conn, kept)
            key_values.put(conn, log_mark(allocation_id), mark)

        await self._hub.store.write(write)
        self._hub.subscriptions.publish(("log", task_id))

    async def claim(self, allocation_id: str, node: int, code: str, runner: str) -> Claim:
        """Give credentials to whoever is about to run an allocation."""
        return await _tickets.claim(self._hub, allocation_id, node, code, runner)

    async def open_context(self, digest: str) -> IO[bytes]:
        """Open a context archive."""
        return await _tickets.open_context(self._hub, digest)

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
        return await _tickets.deliver(self._hub, allocation_id, node, token, name, data, offset=offset, digest=digest)

    async def journal(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take what a dead process left in its journal."""
        allocation = self._hub.live.allocations.get(allocation_id)
        if allocation is not None:
            await _reports.left_behind(self._hub, allocation, rank, records, restart)

    async def reports(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take what a process that lives has reported while no master was there."""
        allocation = self._hub.live.allocations.get(allocation_id)
        if allocation is not None:
            await _reports.journal(self._hub, allocation.trial.id, allocation.run_id, rank, records, restart)
