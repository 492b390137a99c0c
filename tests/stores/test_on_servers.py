"""The conformance suite on the servers and file systems that ``tests/fast`` leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import sync
from gcsfs.core import simple_upload

import fast.storage.test_object_suite as suite
from det_core.storage._object_store import ObjectStore
from support.servers import GcsServer, S3Server


class TestSuiteOnRgw(suite.OnS3):
    @pytest.fixture
    def server(self, rgw_server: S3Server) -> S3Server:
        return rgw_server


class TestSuiteOnGcs(suite.OnObjects):
    @pytest.fixture(autouse=True)
    def bucket(self, gcs_server: GcsServer) -> None:
        self.server, self.name = gcs_server, gcs_server.make_bucket()

    def storage(self, folder: Path) -> dict[str, Any]:
        return {"type": "gcs", "bucket": self.name, "prefix": "a/b", "endpoint_url": self.server.url}

    def test_folders_that_determined_put_come_back_and_go(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        assert isinstance(store, ObjectStore)
        fs = store.driver.fs
        put = lambda key, data: sync(fs.loop, simple_upload, fs, self.name, f"a/b/{key}", data)  # noqa: E731
        suite.folders_of_determined(store, tmp_path, put)


class TestSuiteOnDisk(suite.OnObjects):
    def storage(self, folder: Path) -> str:
        return f"local://{folder}"
