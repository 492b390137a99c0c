"""Preemption: who waits for the word to stop, and when it was said (§5.6)."""

from __future__ import annotations

import asyncio

from det_core.master.service._news import resolve


class Signals:
    """The word to stop, per allocation. A poll that waits costs a future and a timer, and nothing while it waits."""

    def __init__(self) -> None:
        self._said: dict[str, bool] = {}
        self._waiting: dict[str, set[asyncio.Future[bool]]] = {}

    def open(self, allocation_id: str, *, said: bool = False) -> None:
        """An allocation runs (again known, if it was already). ``said``: it was told to stop before."""
        self._said.setdefault(allocation_id, False)
        if said:
            self.say(allocation_id)

    def say(self, allocation_id: str) -> None:
        """Tell an allocation to stop: every poll that waits gets True at once."""
        if allocation_id in self._said:
            self._said[allocation_id] = True
            self._wake(allocation_id)

    def close(self, allocation_id: str) -> None:
        """The allocation has ended: polls that wait get True (§5.6), later ones False."""
        if self._said.pop(allocation_id, None) is not None:
            self._wake(allocation_id)

    def said(self, allocation_id: str) -> bool:
        """Whether the allocation was told to stop, and has not ended."""
        return self._said.get(allocation_id, False)

    async def wait(self, allocation_id: str, timeout: float) -> bool:
        """Whether to stop; waits up to ``timeout`` seconds for it. With 0 it says what is so now."""
        said = self._said.get(allocation_id)
        if said is None or said or timeout <= 0:
            return bool(said)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        waiting = self._waiting.setdefault(allocation_id, set())
        waiting.add(waiter)
        timer = loop.call_later(timeout, resolve, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()
            waiting.discard(waiter)
            if not waiting:
                self._waiting.pop(allocation_id, None)

    def release(self) -> None:
        """Send all who wait away with False: the master stops."""
        for waiting in list(self._waiting.values()):
            for waiter in list(waiting):
                resolve(waiter, False)

    def _wake(self, allocation_id: str) -> None:
        for waiter in list(self._waiting.get(allocation_id, ())):
            resolve(waiter, True)
