"""Object stores for tests, and what lies in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from det_core.storage._objects import Bucket, Door, ObjectStore
from det_core.storage._objects._named import open_fsspec
from det_core.storage._objects._run import run

T = TypeVar("T")


def object_store(url: str, scratch: Path) -> ObjectStore:
    """A store on any file system of fsspec, also on one that det_core opens as a directory."""
    return open_fsspec(scratch, url)


def through(store: ObjectStore, door: Callable[[Bucket], Door]) -> ObjectStore:
    """The same store through another door."""
    return ObjectStore(door(store.door.bucket), store.scratch)


def in_bucket(store: ObjectStore, work: Callable[[Bucket], Awaitable[T]]) -> T:
    """Do something behind the store's back."""
    return run(store.root, lambda _: work(store.door.bucket))


def contents(store: ObjectStore, prefix: str = "") -> dict[str, bytes]:
    """Every object, with its bytes."""

    async def read(bucket: Bucket) -> dict[str, bytes]:
        return {entry.key: await bucket.get(entry.key) for entry in await bucket.list(prefix)}

    return in_bucket(store, read)


def keys(store: ObjectStore, prefix: str = "") -> set[str]:
    """The name of every object."""
    return {entry.key for entry in in_bucket(store, lambda bucket: bucket.list(prefix))}


@contextmanager
def closing() -> Iterator[Callable[[Any], Any]]:
    """Gives a function that takes a store, and closes all that it was given at the end."""
    opened: list[ObjectStore] = []

    def take(store: ObjectStore) -> ObjectStore:
        opened.append(store)
        return store

    try:
        yield take
    finally:
        for store in opened:
            store.close()
