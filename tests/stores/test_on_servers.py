"""The conformance suite on the servers and file systems that ``tests/fast`` leaves out."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import sync
from gcsfs.core import simple_upload

import fast.storage.test_object_suite as suite
from det_core.storage import open_store
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

    def test_directory_objects_of_determined_are_read_and_deleted(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        assert isinstance(store, ObjectStore)
        fs = store.driver.fs
        put = lambda key, data: sync(fs.loop, simple_upload, fs, self.name, f"a/b/{key}", data)  # noqa: E731
        suite.folders_of_determined(store, tmp_path, put)


class TestSuiteOnDisk(suite.OnObjects):
    def storage(self, folder: Path) -> str:
        return f"local://{folder}"


def test_close_closes_connections_of_a_referenced_file_system(rgw_server: S3Server, tmp_path: Path) -> None:
    before = sockets()
    store = open_store(rgw_server.storage(rgw_server.make_bucket()), tmp_path, scratch=tmp_path)
    assert isinstance(store, ObjectStore)
    fs = store.driver.fs  # as a cycle of references would
    assert store.list() == [] and sockets() - before
    store.close()
    for _ in range(5):  # the event loop closes a socket a little later than requested
        sync(fs.loop, asyncio.sleep, 0)
    assert not sockets() - before
    assert store.list() == []
    store.close()


def sockets() -> set[str]:
    """Return the sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if each.startswith("socket:")}
