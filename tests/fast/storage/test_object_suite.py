"""The conformance suite on object stores: on servers of each protocol, and on file systems of fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core.storage import Store, open_store
from det_core.storage._objects import ObjectStore
from det_core.testing import CheckpointStoreSuite
from support.buckets import closing, in_bucket
from support.servers import GcsServer, S3Server


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
            return in_bucket(store, lambda bucket: bucket.delete([key]))
        data = change(in_bucket(store, lambda bucket: bucket.get(key)))
        in_bucket(store, lambda bucket: bucket.put(key, data))

    def beside(self, store: Store, name: str) -> bytes:
        assert isinstance(store, ObjectStore)
        return in_bucket(store, lambda bucket: bucket.get(name))


class TestInMemory(OnObjects):
    def storage(self, folder: Path) -> str:
        return f"memory:/{folder}"


class TestOnDisk(OnObjects):
    def storage(self, folder: Path) -> str:
        return f"local://{folder}"


class TestOnS3(OnObjects):
    @pytest.fixture(autouse=True)
    def bucket(self, s3_server: S3Server) -> None:
        self.server, self.name = s3_server, s3_server.make_bucket()

    def storage(self, folder: Path) -> dict[str, Any]:
        return self.server.storage(self.name, "a prefix/of it")


class TestOnGcs(OnObjects):
    @pytest.fixture(autouse=True)
    def bucket(self, gcs_server: GcsServer) -> None:
        self.server, self.name = gcs_server, gcs_server.make_bucket()

    def storage(self, folder: Path) -> dict[str, Any]:
        return {"type": "gcs", "bucket": self.name, "prefix": "a/b", "endpoint_url": self.server.url}
