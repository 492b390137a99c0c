"""A bound on the bytes that are in memory at a time."""

from __future__ import annotations

import asyncio
from collections import deque

IN_FLIGHT = 112 << 20
"""Bytes of a transfer that are in memory at a time: seven chunks."""


class Budget:
    """Lets bytes in, first come first served, while there is room for them."""

    def __init__(self, limit: int = IN_FLIGHT) -> None:
        self._limit = limit
        self._left = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> int:
        """Wait for room; returns what to :meth:`give` back. More than all of it waits until it is alone."""
        size = min(size, self._limit)
        if not self._waiting and size <= self._left:
            self._left -= size
            return size
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)
            raise
        return size

    def give(self, size: int) -> None:
        """Make room again."""
        self._left += size
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._left):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._left -= size
                turn.set_result(None)
