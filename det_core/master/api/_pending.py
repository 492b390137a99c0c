"""Requests that wait for an event, and how a stop of the server ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from det_core.master._errors import Stopping

T = TypeVar("T")
LONGEST_WAIT = 60.0
"""Seconds that a request may wait, so that it ends before a proxy in between closes the connection (§2.2)."""


class PendingRequests:
    """All requests that wait.

    Attributes:
        is_released: Whether the server stops.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self.is_released = False

    def __len__(self) -> int:
        return len(self._tasks)

    def release(self) -> None:
        """End all waits, and each later one at once."""
        self.is_released = True
        for task in list(self._tasks):
            task.cancel()

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns.

        Raises:
            Stopping: If the server stops first.
        """
        if self.is_released:
            work.close()
            raise Stopping("the master is about to stop")
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_released:
                raise Stopping("the master is about to stop") from None
            raise
        finally:
            self._tasks.discard(task)
