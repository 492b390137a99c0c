"""Who waits for something to happen: the end of an experiment, the next line of a log, a searcher's event."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class Watch:
    """One who waits for news. What came since the last :meth:`wait` is not missed."""

    def __init__(self) -> None:
        self._told = False
        self._waiter: asyncio.Future[bool] | None = None

    def tell(self) -> None:
        """There is news."""
        self._told = True
        if self._waiter is not None:
            resolve(self._waiter, True)

    async def wait(self, timeout: float) -> bool:
        """Wait for news; False if there was none for ``timeout`` seconds."""
        if not self._told and timeout > 0:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout, resolve, self._waiter, False)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        told, self._told = self._told, False
        return told


class News:
    """Wakes those who watch a topic. What has happened they look up themselves."""

    def __init__(self) -> None:
        self._watching: dict[Hashable, set[Watch]] = {}
        self.stopped = False

    @contextmanager
    def watch(self, topic: Hashable) -> Iterator[Watch]:
        """Watch a topic for the time of the block."""
        watch = Watch()
        watching = self._watching.setdefault(topic, set())
        watching.add(watch)
        try:
            yield watch
        finally:
            watching.discard(watch)
            if not watching and self._watching.get(topic) is watching:
                del self._watching[topic]

    def tell(self, *topics: Hashable) -> None:
        """Something happened to the topics."""
        for topic in topics:
            for watch in tuple(self._watching.get(topic, ())):
                watch.tell()

    def stop(self) -> None:
        """The master stops: whoever waits looks up what is so, and goes."""
        self.stopped = True
        self.tell(*tuple(self._watching))


def resolve(waiter: asyncio.Future[bool], answer: bool) -> None:
    """Answer a future that may have been given up."""
    if not waiter.done():
        waiter.set_result(answer)
