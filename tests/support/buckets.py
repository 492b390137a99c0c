"""Object stores for tests, what lies in them, and a driver that fails on purpose, at a call that a test chooses."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from det_core.storage._drivers import Driver, generic
from det_core.storage._object_store import ObjectStore

CALLS = {
    "put_bytes": "write", "put_file": "write", "get": "read", "find": "list", "folders": "list", "remove": "delete",
    "abort_multipart_uploads": "delete the parts", "check_bucket": "list",
}  # fmt: skip
"""Method of a driver -> the operation's name in messages."""


def object_store(url: str, scratch: Path) -> ObjectStore:
    """Return a store on any file system of fsspec, also on one that det_core opens as a directory."""
    return ObjectStore(generic(url), scratch)


def contents(store: ObjectStore, prefix: str = "") -> dict[str, bytes]:
    """Return every object, with its bytes."""
    return {key: store.driver.get(key) for key in keys(store, prefix)}


def keys(store: ObjectStore, prefix: str = "") -> set[str]:
    """Return the name of every object."""
    return set(store.keys(prefix))


def put(store: ObjectStore, key: str, data: bytes = b"x") -> None:
    """Store an object behind the store's back."""
    store.driver.put_bytes(key, data)


def unfinished(store: ObjectStore) -> list[Any]:
    """Return multipart uploads that were neither finished nor aborted; only S3 has them."""
    fs = store.driver.fs
    if not hasattr(fs, "call_s3"):
        return []
    found: list[Any] = fs.call_s3("list_multipart_uploads", Bucket=store.driver._base.split("/")[0]).get("Uploads", [])
    return found


@contextmanager
def closing() -> Iterator[Callable[[Any], Any]]:
    """Yield a function that registers a store; all of them are closed at the end."""
    opened: list[ObjectStore] = []

    def take(store: ObjectStore) -> ObjectStore:
        opened.append(store)
        return store

    try:
        yield take
    finally:
        while opened:  # and forgets them: their connections close with the last that knows them
            opened.pop().close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let botocore retry a request at once, with the usual number of tries."""
    from botocore.retries.standard import ExponentialBackoff

    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0)


class Around(Driver):
    """A driver of which a subclass decides what becomes of each call."""

    def __init__(self, driver: Driver) -> None:
        driver.fs  # noqa: B018  # one for both
        self.__dict__.update(vars(driver))
        for name in CALLS:
            setattr(self, name, self._around(name, getattr(driver, name)))

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call, or do something else."""
        return call(*args)

    def with_few_tries(self) -> Driver:
        """Keep the number of tries."""
        return self

    def close(self) -> None:
        """Leave the file system open, which others use."""

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            key = args[1] if name == "put_file" else args[0] if args else ""
            return self.attempt(CALLS[name], key[0] if isinstance(key, list) else key, call, *args, **kwargs)

        return attempt


def through(store: ObjectStore, driver: Callable[[Driver], Driver]) -> ObjectStore:
    """Return the same store with another driver."""
    return ObjectStore(driver(store.driver), store.scratch.root)


class FaultyDriver(Around):
    """A driver whose ``at``-th call (from 1) fails; calls run side by side, so which one that is may differ.

    Args:
        driver: what does the work.
        at: which call.
        how: ``EIO``, ``ENOSPC``, ``EACCES``: it refuses; ``lost``: it does it, and then the connection is reset;
            ``dead``: it and all after it are refused; ``short``: a body comes without its last byte; ``exit``: the
            process ends without a word before the call, ``exit-after``: after it.
        only: count the calls alone whose operation begins with one of these.
    """

    def __init__(self, driver: Driver, at: int = 0, how: str = "EIO", only: tuple[str, ...] = ("",)) -> None:
        super().__init__(driver)
        self.at, self.how, self.only, self.calls = at, how, only, 0
        self.struck = ""
        """The operation that failed."""
        self._lock = threading.Lock()

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        if not self._strikes(operation):
            return call(*args)
        if self.how == "exit":
            os._exit(77)
        if self.how in ("lost", "exit-after", "short"):
            found = call(*args)
            if self.how == "exit-after":
                os._exit(77)
            if self.how == "short":
                return found[:-1] if isinstance(found, bytes) else found
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        number = getattr(errno, self.how, errno.EIO)
        raise OSError(number, os.strerror(number))

    def _strikes(self, operation: str) -> bool:
        if not operation.startswith(self.only):
            return False
        with self._lock:
            self.calls += 1
            if self.calls != self.at and not (self.calls > self.at > 0 and self.how == "dead"):
                return False
            self.struck = self.struck or operation
            return True
