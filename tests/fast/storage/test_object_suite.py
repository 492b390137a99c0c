"""The conformance suite on object stores: in memory by fsspec, and on S3; on all others in ``tests/stores``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core.storage import Store, open_store
from det_core.storage._object_store import ObjectStore
from support.buckets import closing, put
from support.servers import S3Server
from support.store_suite import CheckpointStoreSuite


class OnObjects(CheckpointStoreSuite):
    """What the suite needs of any object store."""

    @pytest.fixture(autouse=True)
    def stores(self) -> Iterator[None]:
        with closing() as self.opened:
            yield

    def storage(self, folder: Path) -> Any:
        """``checkpoint_storage`` for a place of this test alone."""
        raise NotImplementedError

    def make_store(self, folder: Path) -> Store:
        return self.opened(open_store(self.storage(folder), folder, scratch=folder.parent / "scratch"))

    def damage(self, store: Store, storage_id: str, path: str, change: Callable[[bytes], bytes] | None) -> None:
        assert isinstance(store, ObjectStore)
        key = f"{storage_id}/{path}"
        if change is None:
            return store.driver.remove([key])
        put(store, key, change(store.driver.get(key)))

    def beside(self, store: Store, name: str) -> bytes:
        assert isinstance(store, ObjectStore)
        return store.driver.get(name)


class OnS3(OnObjects):
    """On the server that ``server`` gives."""

    @pytest.fixture(autouse=True)
    def bucket(self, server: S3Server) -> None:
        self.server, self.name = server, server.make_bucket()

    def storage(self, folder: Path) -> dict[str, Any]:
        return self.server.storage(self.name, "a prefix/of it")


class TestInMemory(OnObjects):
    def storage(self, folder: Path) -> str:
        return f"memory:/{folder}"


class TestOnS3(OnS3):
    @pytest.fixture
    def server(self, moto_server: S3Server) -> S3Server:
        return moto_server
