"""Changes by topic, in order: for requests that wait for one, and for readers that come back for those they missed.

Topics are ``("experiment", id)``, ``("trial", id)`` (with its allocation, operations and checkpoints),
``("metrics", trial id)``, ``("log", task id)`` and ``("allocation", id)``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_TOPICS = 16_384
"""Topics whose last change is kept; a reader that missed more reads anew."""
ANY = object()
"""Topic that stands for every one."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Place in the sequence of changes.

    Attributes:
        start: Start of the master that counted it; a later one counts anew.
        number: Number of the last change before it.
    """

    start: str
    number: int


class Subscriptions:
    """Numbered changes of topics; what has changed, a reader looks up itself.

    A topic counts once, by its last change: that bounds what is kept by the number of topics, however often they
    change. All methods belong to the loop. Read :attr:`cursor` first, then the state, then wait from that cursor: so
    no change is missed.

    Args:
        max_topics: Maximum number of topics to keep.

    Attributes:
        is_closed: Whether the master stops, so that nothing is worth waiting for.
    """

    def __init__(self, max_topics: int = MAX_TOPICS) -> None:
        self.is_closed = False
        self._max_topics = max_topics
        self._start = secrets.token_hex(8)
        self._number = 0
        self._last: OrderedDict[Hashable, int] = OrderedDict()
        """Topic -> number of its last change, the oldest first."""
        self._forgotten = 0
        """Greatest number of a change that is no longer kept."""
        self._waiting: dict[Hashable, set[asyncio.Future[bool]]] = {}

    @property
    def cursor(self) -> Cursor:
        """The place behind all changes so far."""
        return Cursor(self._start, self._number)

    def publish(self, *topics: Hashable) -> None:
        """Count a change of each topic, and wake those who wait for it."""
        for topic in topics:
            self._number += 1
            self._last[topic] = self._number
            self._last.move_to_end(topic)
            if len(self._last) > self._max_topics:
                # The topic that changed longest ago; a cursor from before it gets everything.
                _, self._forgotten = self._last.popitem(last=False)
            self._wake(topic)
        self._wake(ANY)

    def since(self, cursor: Cursor) -> list[Hashable] | None:
        """Return the topics that changed after a cursor, in order; None if it is too old, or of another master."""
        if cursor.start != self._start or not self._forgotten <= cursor.number <= self._number:
            return None
        changed = []
        # Topics stand in the order of their last change, so few are looked at.
        for topic, number in reversed(self._last.items()):
            if number <= cursor.number:
                break
            changed.append(topic)
        changed.reverse()
        return changed

    async def wait(self, topic: Hashable, cursor: Cursor, timeout: float) -> bool:
        """Wait for a change of a topic after a cursor.

        Args:
            topic: Topic; ``ANY`` for all.
            cursor: Place from which changes count. From one that is too old, everything has changed.
            timeout: Maximum wait in seconds.

        Returns:
            Whether it changed; False after the timeout, and when the master stops.
        """
        if self._has_changed(topic, cursor):
            return True
        if self.is_closed or timeout <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        waiters = self._waiting.setdefault(topic, set())
        waiters.add(waiter)
        timer = loop.call_later(timeout, _resolve, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()
            waiters.discard(waiter)
            # By identity: when the last one leaves late, others may wait in a new set already.
            if not waiters and self._waiting.get(topic) is waiters:
                del self._waiting[topic]

    def close(self) -> None:
        """Send away all who wait: the master stops."""
        self.is_closed = True
        for waiters in list(self._waiting.values()):
            for waiter in waiters:
                _resolve(waiter, False)

    def _has_changed(self, topic: Hashable, cursor: Cursor) -> bool:
        if cursor.start != self._start or cursor.number < self._forgotten:
            return True
        if topic is ANY:
            return self._number > cursor.number
        return self._last.get(topic, 0) > cursor.number

    def _wake(self, topic: Hashable) -> None:
        for waiter in self._waiting.get(topic, ()):
            _resolve(waiter, True)


def _resolve(waiter: asyncio.Future[bool], answer: bool) -> None:
    if not waiter.done():
        waiter.set_result(answer)
