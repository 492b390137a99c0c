"""The conformance suite on object stores: file systems of fsspec, in memory and on a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from det_core.storage import Store
from det_core.storage._objects import ObjectStore
from det_core.testing import CheckpointStoreSuite
from support.buckets import closing, in_bucket, object_store


class OnObjects(CheckpointStoreSuite):
    """What the suite needs of any object store."""

    def url(self, folder: Path) -> str:
        """A place of this test alone."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def stores(self) -> Iterator[None]:
        with closing() as self.opened:
            yield

    def make_store(self, folder: Path) -> Store:
        return self.opened(object_store(self.url(folder), folder.parent / "scratch"))

    def damage(self, store: Store, storage_id: str, path: str, change: Callable[[bytes], bytes] | None) -> None:
        assert isinstance(store, ObjectStore)
        key = f"{storage_id}/{path}"
        if change is None:
            return in_bucket(store, lambda bucket: bucket.delete([key]))
        data = change(in_bucket(store, lambda bucket: bucket.get(key)))
        in_bucket(store, lambda bucket: bucket.put(key, data))

    def beside(self, store: Store, name: str) -> bytes:
        assert isinstance(store, ObjectStore)
        return in_bucket(store, lambda bucket: bucket.get(name))


class TestInMemory(OnObjects):
    def url(self, folder: Path) -> str:
        return f"memory:/{folder}"


class TestOnDisk(OnObjects):
    def url(self, folder: Path) -> str:
        return f"local://{folder}"
