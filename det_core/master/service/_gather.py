"""Barriers with data between the processes of an allocation (§6)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from det_core.master._errors import Conflict, Invalid


class Barrier:
    """Where ``peers`` processes meet, each known by an id of its own choice; all get what each brought.

    Args:
        peers: how many they are.
    """

    def __init__(self, peers: int) -> None:
        self.peers = peers
        self._brought: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, asyncio.Future[list[dict[str, Any]]]] = {}

    async def meet(self, request: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Bring ``data`` and wait for the others. Who comes again takes the place of its earlier self.

        Raises:
            Conflict: the same id came again on another connection; or the allocation has ended.
        """
        self._brought[request] = dict(data)
        earlier = self._waiting.pop(request, None)
        if earlier is not None and not earlier.done():
            earlier.set_exception(Conflict(f"request {request} came again on another connection"))
        if len(self._brought) >= self.peers:
            self._release()
            return self._all()
        waiter = self._waiting[request] = asyncio.get_running_loop().create_future()
        everything: list[dict[str, Any]] = await waiter
        return everything

    def fail(self, why: str) -> None:
        """Send all who wait away."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(Conflict(why))
        self._waiting.clear()

    def _release(self) -> None:
        everything = self._all()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(everything)
        self._waiting.clear()

    def _all(self) -> list[dict[str, Any]]:
        return list(self._brought.values())


class Gatherings:
    """The barriers of all allocations that run."""

    def __init__(self) -> None:
        self._barriers: dict[tuple[str, str], Barrier] = {}

    async def meet(
        self, allocation_id: str, name: str, request: str, peers: int, data: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Meet at the barrier ``name`` of an allocation.

        Raises:
            Invalid: no peers, or another number of them than the first one said.
            Conflict: see :meth:`Barrier.meet`.
        """
        if peers < 1 or not request:
            raise Invalid(f"allocation {allocation_id}: {name} needs a requestUuid and at least 1 peer, not {peers}")
        barrier = self._barriers.setdefault((allocation_id, name), Barrier(peers))
        if barrier.peers != peers:
            raise Invalid(f"allocation {allocation_id}: {name} is of {barrier.peers} peers, not of {peers}")
        return await barrier.meet(request, data)

    def end(self, allocation_id: str) -> None:
        """The allocation has ended."""
        for key in [key for key in self._barriers if key[0] == allocation_id]:
            self._barriers.pop(key).fail(f"allocation {allocation_id} has ended")
