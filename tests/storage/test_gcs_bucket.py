"""The GCS driver against an emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from det_core.storage._objects._gcs import GcsBucket
from support.bucket_behaviour import BucketBehaviour, call
from support.servers import GcsServer


class TestGcsBucket(BucketBehaviour):
    many = 150  # the emulator has no pages, and is slow to delete

    @pytest.fixture
    def bucket(self, gcs_server: GcsServer) -> Iterator[GcsBucket]:
        bucket = GcsBucket(gcs_server.make_bucket(), "some/prefix", endpoint_url=gcs_server.url)
        yield bucket
        call(bucket.close)
