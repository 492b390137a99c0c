"""Requests that wait: for a signal, for peers, for lines of a log."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request

from det_core.master._errors import Stopping

T = TypeVar("T")


class Waits:
    """All requests that wait, so that they end when their client leaves or the server stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self.released = False

    def release(self) -> None:
        """End all of them, and each that is to come, at once."""
        self.released = True
        for task in list(self._tasks):
            task.cancel()

    async def wait(self, work: Coroutine[Any, Any, T], request: Request | None = None) -> T:
        """What ``work`` returns.

        Args:
            work: what takes its time; it is cancelled if nobody needs it any more.
            request: whose client may leave meanwhile; None: somebody else watches that.

        Raises:
            Stopping: the server stops, or the client has gone (and does not hear it).
        """
        if self.released:
            work.close()
            raise Stopping("the master is about to stop")
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(request)) if request is not None else None
        self._tasks.add(task)
        try:
            await asyncio.wait([task] if gone is None else [task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if not task.cancelled():  # it is we who were cancelled
                raise
            raise Stopping("the master is about to stop") from None
        finally:
            self._tasks.discard(task)
            for each in (task, gone):
                if each is not None and not each.done():
                    each.cancel()
                    with suppress(asyncio.CancelledError):
                        await each


async def _gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
