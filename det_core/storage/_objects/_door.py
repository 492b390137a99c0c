"""The one door between a store and its service: retries, deadlines, and the naming of errors."""

from __future__ import annotations

import asyncio
import builtins
import copy
import errno
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from random import SystemRandom
from types import TracebackType
from typing import Any, TypeVar

from det_core import _clock
from det_core.errors import DetCoreError, StorageError
from det_core.storage._objects._bucket import Bucket, Entry, KeyMissing

T = TypeVar("T")
_jitter = SystemRandom()  # the global generator's numbers are the script's
log = logging.getLogger("det_core.storage")
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
LONGEST_ASKED = 60.0
"""Seconds of ``Retry-After`` that are honoured."""
PATIENCE = 60.0
"""Seconds after its first failure for which a call is tried again."""
DEADLINE = 60.0
"""Seconds for one request, beside those for its bytes."""
SLOWEST = 128 << 10
"""Bytes per second below which a request counts as stuck."""
QUIET = 5.0
"""Seconds of trying before there is a warning, and between two."""
LIST_DEADLINE = 600.0
"""For a listing, which may have many pages."""
KEYS = 1000
"""Deleted by one call."""


class Door:
    """Every call to a bucket, so that each is retried, bounded in time and named in one place.

    A test makes any one fail by overriding :meth:`attempt`.

    Args:
        bucket: the driver.
        patience: seconds for which a call that failed is tried again, if that may help.
    """

    def __init__(self, bucket: Bucket, *, patience: float = PATIENCE) -> None:
        self.bucket = bucket
        self._patience = patience
        self._process: int | None = None
        self._longest = float("inf")
        self._warned = float("-inf")

    @property
    def where(self) -> str:
        """How messages name the store."""
        return self.bucket.url

    @property
    def concurrency(self) -> int:
        """How many calls are worth having in flight."""
        return self.bucket.concurrency

    def hasty(self, patience: float, longest: float) -> Door:
        """The same door for somebody who has less patience, and gives a request ``longest`` seconds."""
        door = copy.copy(self)
        door._patience, door._longest = min(patience, self._patience), longest
        return door

    async def attempt(self, operation: str, key: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """One try of one call."""
        return await function(*args)

    async def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        await self._do("write", key, len(data), self.bucket.put, key, data)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of an object; raises KeyMissing."""
        size = (end - start) if end is not None else 16 << 20
        return await self._do("read", key, size, self.bucket.get, key, start, end)

    async def begin_parts(self, key: str, size: int) -> Any:
        """Begin an object of several parts."""
        return await self._do("begin", key, 0, self.bucket.begin_parts, key, size)

    async def put_part(self, key: str, upload: Any, number: int, data: bytes) -> Any:
        """Store one part."""
        return await self._do(f"write part {number} of", key, len(data), self.bucket.put_part, upload, number, data)

    async def finish_parts(self, key: str, upload: Any, parts: builtins.list[Any]) -> None:
        """Make the object of its parts."""
        await self._do("finish", key, len(parts) << 20, self.bucket.finish_parts, upload, parts)

    async def abort_parts(self, key: str, upload: Any) -> None:
        """Give the parts up."""
        await self._do("give up the parts of", key, 0, self.bucket.abort_parts, upload)

    async def list(self, prefix: str) -> builtins.list[Entry]:
        """Every object under a prefix."""
        size = int((LIST_DEADLINE - DEADLINE) * SLOWEST)
        return await self._do("list", prefix, size, self.bucket.list, prefix)

    async def children(self, prefix: str) -> builtins.list[str]:
        """What lies directly in a folder."""
        size = int((LIST_DEADLINE - DEADLINE) * SLOWEST)
        return await self._do("list", prefix or "/", size, self.bucket.children, prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        for first in range(0, len(keys), KEYS):
            some = keys[first : first + KEYS]
            await self._do("delete", some[0], len(some) << 16, self.bucket.delete, some)

    async def abort_stale(self, prefix: str) -> None:
        """Give up every object of several parts under a prefix that was never finished."""
        for upload in await self._do("find unfinished parts under", prefix, 0, self.bucket.stale_parts, prefix):
            await self.abort_parts(prefix, upload)

    async def close(self) -> None:
        """Give connections back. Those of the process that this one was forked from are left alone."""
        if self._process in (None, os.getpid()):
            await self._do("close the connections to", "it", 0, self.bucket.close)

    async def _do(self, operation: str, key: str, size: int, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call until it succeeds, cannot succeed, or patience ends; the last error is named.

        Raises:
            KeyMissing: as the bucket does.
            StorageError: the message names store, key and operation.
        """
        self._check_process(operation, key)
        began: float | None = None
        for number in itertools.count():
            try:
                with Deadline(min(DEADLINE + size / SLOWEST, self._longest)):
                    return await self.attempt(operation, key, function, *args)
            except (KeyMissing, DetCoreError):
                raise
            except Exception as e:
                now = _clock.monotonic()
                began = now if began is None else began
                if now > began + self._patience or not self._may_pass(e):
                    raise self.bucket.explain(operation, key, e) from e
                if now > max(began + QUIET, self._warned + QUIET):
                    self._warned = now
                    log.warning("%s; for %.0f s it is tried again", self.bucket.explain(operation, key, e), now - began)
                await asyncio.sleep(self._pause(number, e, began + self._patience - now))
        raise AssertionError("unreachable")

    def unsettled(self, error: BaseException) -> bool:
        """Whether what was asked for may be done yet, though this was raised: its answer was lost or not awaited."""
        if self.bucket.concludes:
            return False
        if isinstance(error, StorageError):
            return isinstance(error.__cause__, Exception) and self._may_pass(error.__cause__)
        return not isinstance(error, Exception)

    def _may_pass(self, error: Exception) -> bool:
        return isinstance(error, asyncio.TimeoutError | TimeoutError) or self.bucket.retryable(error)

    def _pause(self, number: int, error: Exception, left: float) -> float:
        """Seconds until the next try; with ``left`` of patience, the last is when that ends."""
        asked = self.bucket.retry_after(error)
        if asked is not None:
            return min(max(asked, 0.0), LONGEST_ASKED, self._patience) + _jitter.uniform(0, FIRST_PAUSE)
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * float(2 ** min(number, 16)))
        return min(longest * _jitter.uniform(0.5, 1), left)

    def _check_process(self, operation: str, key: str) -> None:
        """A process that was forked shares the connections of the first, and must not use them."""
        if self._process is None:
            self._process = os.getpid()
        if self._process != os.getpid():
            text = "this process was forked from the one that opened the store; open it anew after the fork"
            raise StorageError(errno.ENOTCONN, f"checkpoint store {self.where}: cannot {operation} {key}: {text}")


class Deadline:
    """Cancels the block when its time is over, which then raises TimeoutError. (asyncio.timeout is not in 3.10.)"""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._struck = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can have a deadline"
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._strike)

    def _strike(self) -> None:
        self._struck = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._timer.cancel()
        if not self._struck:
            return
        if hasattr(self._task, "uncancel") and self._task.uncancel() > 0:
            return  # somebody else wants it to end, too
        if kind is asyncio.CancelledError:
            raise TimeoutError(f"no answer within {self._seconds:.0f} s") from error
