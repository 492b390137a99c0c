"""Ranks as threads of the test's own process: for what needs neither death nor signals, and is to be quick."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from det_core import core
from support.processes import free_port, until

T = TypeVar("T")
PEER_TIMEOUT = 60
"""Seconds for the other ranks to end once one has failed."""


def as_ranks(size: int, work: Callable[[core.DistributedContext], T]) -> list[T]:
    """Run ``work(distributed)`` on ``size`` ranks of one machine; the results in rank order.

    Raises:
        BaseException: what the lowest rank that failed has raised.
    """
    port = free_port()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            distributed = core.DistributedContext(
                rank=rank,
                size=size,
                local_rank=rank,
                local_size=size,
                cross_rank=0,
                cross_size=1,
                pub_port=port,
            )
            try:
                results[rank] = work(distributed)
            finally:
                distributed.close()
        except BaseException as e:
            errors[rank] = e

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    join_ranks(threads, lambda: next(iter(errors.values()), None))
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(size)]


def join_ranks(threads: Sequence[threading.Thread], error: Callable[[], BaseException | None]) -> None:
    """Wait for the threads of all ranks.

    Args:
        threads: a thread per rank.
        error: the exception of a rank that failed, if any: the others then have ``PEER_TIMEOUT`` seconds to end.

    Raises:
        BaseException: If one rank has failed and another waits for it for ever.
    """
    failed: float | None = None
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            failure = error()
            if failure is not None:
                failed = failed or time.monotonic()
                if time.monotonic() - failed > PEER_TIMEOUT:
                    raise failure


def once_it_waits(
    do: Callable[[], object], file: str = "_commit.py", *, thread: threading.Thread | None = None
) -> None:
    """Have ``do`` called, in another thread, once ``file`` waits in this one, so that it is not to go on alone.

    Args:
        do: what to call.
        file: the module that waits.
        thread: the thread that waits. Defaults to the caller's.
    """
    waiter = (thread or threading.current_thread()).ident

    def waits() -> bool:
        frame, waits = sys._current_frames().get(waiter or 0), False
        while frame is not None:
            waits = waits or frame.f_code.co_name == "wait"
            if (
                waits
                and frame.f_code.co_filename.endswith(file)
                and frame.f_code.co_name in ("close", "finish_previous")
            ):
                return True
            frame = frame.f_back
        return False

    threading.Thread(target=lambda: (until(waits), do())).start()
