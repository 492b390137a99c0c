"""Blocking calls that may hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[..., T], *args: Any) -> T:
    """Return what ``work(*args)`` returns, called in a thread of its own.

    A storage that hangs would hold one of the few threads of the loop's pool, which all else shares, and keep the
    process from ending, which waits for that pool.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: Any = work(*args)
            set_outcome: Callable[[Any], None] = future.set_result
        except BaseException as e:
            outcome = e
            set_outcome = future.set_exception
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_outcome, outcome)

    threading.Thread(target=run, name=f"det_core master: {work.__name__}", daemon=True).start()
    return await future
