"""The conformance suite on the servers and file systems that ``tests/fast`` leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fast.storage.test_object_suite as suite
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


class TestSuiteOnDisk(suite.OnObjects):
    def storage(self, folder: Path) -> str:
        return f"local://{folder}"
