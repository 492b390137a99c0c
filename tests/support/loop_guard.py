"""Guard of event loops: finds callbacks that keep one from everything else."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_CPU_SECONDS = 0.4
"""CPU time of the loop's thread in one callback: twice the 0.2 s that are allowed on an idle machine.

On shared processors the same callback takes up to three times its CPU time; the slowest of the tests takes 0.08 s.
"""


@contextmanager
def guarded_loops() -> Iterator[list[str]]:
    """Yield descriptions of the callbacks that exceed the maximum, on any event loop of this process.

    Garbage collections do not count, as they go through the objects of all tests before; nor do the steps of a test's
    own task, which are the test's code.
    """
    blocked: list[str] = []
    own: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
    run = asyncio.Handle._run
    run_until_complete = asyncio.BaseEventLoop.run_until_complete
    collecting = 0.0
    began_collecting = 0.0

    def on_collection(phase: str, _: object) -> None:
        nonlocal collecting, began_collecting
        if phase == "start":
            began_collecting = time.thread_time()
        else:
            collecting += time.thread_time() - began_collecting

    def noted(loop: asyncio.BaseEventLoop, future: Any) -> Any:
        future = asyncio.ensure_future(future, loop=loop)
        own.add(future)
        return run_until_complete(loop, future)

    def timed(handle: asyncio.Handle) -> None:
        nonlocal collecting
        collecting = 0.0
        began = time.thread_time()
        run(handle)
        seconds = time.thread_time() - began - collecting
        if seconds > MAX_CPU_SECONDS:
            # Of a step of a task, the task says what it was.
            task = getattr(handle._callback, "__self__", None)
            if task not in own:
                blocked.append(f"{seconds:.2f} s of CPU in {task or handle!r}")

    gc.callbacks.append(on_collection)
    asyncio.Handle._run = timed  # type: ignore[method-assign]
    asyncio.BaseEventLoop.run_until_complete = noted  # type: ignore[method-assign]
    try:
        yield blocked
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        asyncio.BaseEventLoop.run_until_complete = run_until_complete  # type: ignore[method-assign]
        gc.callbacks.remove(on_collection)
