"""What an object store must be able to do: the seam to each service.

A driver is one class in one module: ``_s3.S3Bucket(bucket, prefix, *, endpoint_url=None, access_key=None,
secret_key=None)``, ``_gcs.GcsBucket(bucket, prefix, *, endpoint_url=None)``, and ``_generic.FsspecBucket`` for any
file system of fsspec. Making one imports its client library, and neither reads nor connects; the first call does.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from det_core.errors import StorageError


class KeyMissing(Exception):
    """There is no object of that key."""


class Entry(NamedTuple):
    """An object as a listing has it."""

    key: str
    size: int
    modified: float
    """When it was put, in seconds since the epoch by the service's clock; 0.0 if it does not say."""


class Bucket(Protocol):
    """Keys (text, ``/`` between folders, relative to the store's root) to bytes.

    Every method is called in fsspec's event loop, by :class:`Door` alone, which retries what :meth:`retryable` says
    and bounds the time of each call. So a driver neither retries by itself nor waits without end, raises what its
    client library raises, and may be cancelled in any ``await``. Calls come ``concurrency`` at a time.
    """

    url: str
    """As messages and records name the store. No secret is ever in it."""
    concurrency: int
    """How many requests are worth having in flight."""
    concludes: bool
    """Whether a call that is cancelled is over when it raises; else its service may carry it out yet."""

    def part_size(self, size: int) -> int:
        """Bytes per part of an object of ``size`` bytes; one that is not larger is put as a whole.

        It is rounded up to whole chunks of the manifest, of 16 MiB each; every part but the last has that size.
        """

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, in place of one that may be there, in one step."""

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of an object; fewer, or none, if it ends before.

        Raises:
            KeyMissing: it is not there.
        """

    async def begin_parts(self, key: str, size: int) -> Any:
        """Begin an object of several parts; returns what the next three take. It is not there before it is finished."""

    async def put_part(self, upload: Any, number: int, data: bytes | memoryview) -> Any:
        """Store part ``number`` (from 1); returns what :meth:`finish_parts` takes. Parts come in any order."""

    async def finish_parts(self, upload: Any, parts: builtins.list[Any]) -> None:
        """Make the object of all its parts, given in order, in one step."""

    async def abort_parts(self, upload: Any) -> None:
        """Give the parts up; what was finished or given up before is no error."""

    async def list(self, prefix: str) -> builtins.list[Entry]:
        """Every object whose key begins with ``prefix`` (text, not a folder's name), sorted by key."""

    async def children(self, prefix: str) -> builtins.list[str]:
        """The names directly in the folder ``prefix`` (empty, or ending in ``/``); those of folders end in ``/``."""

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, however many; those that are not there are no error."""

    async def stale_parts(self, prefix: str) -> builtins.list[Any]:
        """The objects of several parts that were begun under ``prefix`` and never finished, for :meth:`abort_parts`."""

    async def close(self) -> None:
        """Give all connections back. A later call makes new ones."""

    def retryable(self, error: Exception) -> bool:
        """Whether the same call may succeed in a moment: throttled, overloaded, reset, timed out."""

    def retry_after(self, error: Exception) -> float | None:
        """The seconds that the service asked to wait (``Retry-After``); None: it did not say."""

    def explain(self, operation: str, key: str, error: Exception) -> StorageError:
        """One line for what was refused: store, path, operation, and what to do.

        Wrong key or secret, access denied, missing bucket, a clock that is off, throttling, no space are told apart,
        and have errno of the same meaning (EACCES, ENOENT, EAGAIN, ENOSPC, …; EIO for the rest).
        """
