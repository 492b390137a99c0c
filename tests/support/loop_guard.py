"""Guard of event loops: finds callbacks that keep one from everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_CPU_SECONDS = 0.4
"""CPU time of the loop's thread in one callback: twice the 0.2 s that are allowed on an idle machine.

On shared processors the same callback takes up to three times its CPU time; the slowest of the tests takes 0.08 s.
"""


@contextmanager
def guarded_loops() -> Iterator[list[str]]:
    """Yield descriptions of the callbacks that exceed the maximum, on any event loop of this process."""
    blocked: list[str] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        seconds = time.thread_time() - began
        if seconds > MAX_CPU_SECONDS:
            # Of a step of a task, the task says what it was.
            task = getattr(handle._callback, "__self__", None)
            blocked.append(f"{seconds:.2f} s of CPU in {task or handle!r}")

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield blocked
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
