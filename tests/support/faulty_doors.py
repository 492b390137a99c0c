"""Doors to buckets that fail on purpose, at a call that a test chooses."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from det_core.storage._objects import Bucket, Door

T = TypeVar("T")
PASSING = ("reset", "lost", "503")
PERMANENT = ("EIO", "ENOSPC", "EACCES", "dead")


class Overloaded(Exception):
    """An answer of status 503."""

    status = 503

    def __init__(self) -> None:
        super().__init__("503 Slow Down")
        self.headers = {"Retry-After": "0.05"}


class FaultyDoor(Door):
    """A door whose ``at``-th try of a call (from 1) fails; calls run side by side, so which one that is may differ.

    Args:
        bucket: the driver.
        at: which try.
        how: ``reset``: the connection is reset before the server sees the request; ``lost``: after it has done it;
            ``503``: it is overloaded and says when to come again; ``short``: a body comes without its last byte;
            ``EIO``, ``ENOSPC``, ``EACCES``: it refuses for good; ``dead``: it and all after it fail;
            ``exit``: the process ends without a word before the request, ``exit-after``: after it.
        only: count the calls alone whose operation begins with one of these.
    """

    def __init__(self, bucket: Bucket, at: int = 0, how: str = "reset", only: tuple[str, ...] = ("",)) -> None:
        super().__init__(bucket, patience=2.0)
        self.at = at
        self.how = how
        self.only = only
        self.calls = 0
        self.struck = ""
        """The operation that failed."""

    def hasty(self, patience: float, longest: float) -> FaultyDoor:
        return self

    async def attempt(self, operation: str, key: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        if not operation.startswith(self.only):
            return await super().attempt(operation, key, function, *args)
        self.calls += 1
        if self.calls != self.at and not (self.calls > self.at > 0 and self.how == "dead"):
            return await super().attempt(operation, key, function, *args)
        if self.how == "exit":
            os._exit(77)
        self.struck = self.struck or operation
        if self.how in ("lost", "exit-after", "short"):
            found = await super().attempt(operation, key, function, *args)
            if self.how == "exit-after":
                os._exit(77)
            if self.how == "short":
                return found[:-1] if isinstance(found, bytes) else found  # type: ignore[return-value]
        if self.how in ("reset", "lost"):
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        raise refusal(self.bucket, self.how)


CODES = {"503": ("SlowDown", 503), "EACCES": ("AccessDenied", 403), "ENOSPC": ("QuotaExceeded", 403)}


def refusal(bucket: Bucket, how: str) -> Exception:
    """The error of a service that is overloaded, or refuses for good, as its client raises it."""
    from det_core.storage._objects._s3 import S3Bucket

    if isinstance(bucket, S3Bucket):
        from botocore.exceptions import ClientError

        code, status = CODES.get(how, ("InvalidRequest", 400))
        answer = {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "0"}}
        return ClientError({"Error": {"Code": code, "Message": "on purpose"}, "ResponseMetadata": answer}, "Try")
    if how == "503":
        return Overloaded()
    number = getattr(errno, how, errno.EIO)
    return OSError(number, os.strerror(number))
