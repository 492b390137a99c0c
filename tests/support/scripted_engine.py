"""An engine that runs nothing: a test says how each allocation ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from det_core.master.engines import Cause, Ended, ExitReport, Listener, Pool, Ticket


@dataclass(frozen=True)
class Launched(Ticket):
    """Ticket of a claimed allocation, with the credential of its script."""

    session_token: str = ""

    @classmethod
    async def claim(cls, ticket: Ticket, listener: Listener) -> Launched:
        """Claim all nodes of an allocation."""
        claims = [await listener.claim(ticket.allocation_id, n, ticket.code, "test") for n in range(ticket.nodes)]
        return cls(**vars(ticket), session_token=claims[0].session_token)


@dataclass
class ScriptedEngine:
    """Engine that keeps its launches; an allocation ends when it is killed, or when the test says so by :meth:`end`.

    Attributes:
        pool: where it runs them.
        launched: what was launched, in order; never removed.
        running: what has not ended, by allocation id.
        graces: seconds that each allocation was given to end.
        listener: who takes journals, once the service has started.
    """

    pool: Pool = field(default_factory=lambda: Pool(2))
    launched: list[Launched] = field(default_factory=list)
    running: dict[str, Launched] = field(default_factory=dict)
    graces: dict[str, float] = field(default_factory=dict)
    listener: Listener | None = None
    _events: asyncio.Queue[Ended] = field(default_factory=asyncio.Queue)

    async def recover(self, known: Mapping[str, str | None], listener: Listener, kept: Mapping[str, int]) -> None:
        """Begin; allocations of the master that this engine does not run are lost."""
        self.listener = listener
        for allocation_id in known:
            if allocation_id not in self.running:
                self._ended(allocation_id, ExitReport(None, None, Cause.LOST, "the machine started anew"))

    async def launch(self, ticket: Ticket) -> None:
        """Claim it, and note it."""
        assert self.listener is not None
        launched = await Launched.claim(ticket, self.listener)
        self.launched.append(launched)
        self.running[ticket.allocation_id] = launched

    async def kill(self, allocation_id: str) -> None:
        """End it, as killed."""
        if allocation_id in self.running:
            self.end(allocation_id, signal=9, killed=True)

    async def terminate(self, allocation_id: str, grace: float) -> None:
        """Note the grace."""
        self.graces[allocation_id] = grace

    async def events(self) -> AsyncIterator[Ended]:
        """Yield the allocations that have ended."""
        while True:
            yield await self._events.get()

    async def forget(self, allocation_id: str) -> None:
        """Do nothing: the engine keeps nothing of an ended allocation."""

    async def close(self) -> None:
        """Do nothing: the engine holds no resources."""

    def end(
        self, allocation_id: str, status: int | None = 0, *, signal: int | None = None, killed: bool = False
    ) -> None:
        """End the script with that status or by that signal; to be called on the loop."""
        cause = Cause.CANCELLED if killed else Cause.NONE
        report = ExitReport(None if signal else status, signal, cause, "as the test says")
        self._ended(allocation_id, report)

    def _ended(self, allocation_id: str, report: ExitReport) -> None:
        self.running.pop(allocation_id, None)
        self._events.put_nowait(Ended(allocation_id, report))
