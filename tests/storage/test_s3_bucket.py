"""The S3 driver against moto and Ceph's gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from det_core.storage._objects._s3 import S3Bucket
from support.bucket_behaviour import BucketBehaviour, call
from support.servers import S3Server


def opened(server: S3Server, bucket: str, prefix: str = "", **changes: str) -> S3Bucket:
    """A driver with the server's keys."""
    options = {"endpoint_url": server.url, "access_key": server.access_key, "secret_key": server.secret_key, **changes}
    return S3Bucket(bucket, prefix, **options)


class TestS3Bucket(BucketBehaviour):
    @pytest.fixture
    def bucket(self, s3_server: S3Server) -> Iterator[S3Bucket]:
        bucket = opened(s3_server, s3_server.make_bucket(), "some/prefix")
        yield bucket
        call(bucket.close)


def test_a_prefix_keeps_stores_apart(s3_server: S3Server) -> None:
    name = s3_server.make_bucket()
    one, whole = opened(s3_server, name, "one"), opened(s3_server, name)
    try:
        call(one.put, "key", b"1")
        call(whole.put, "one-more/key", b"2")
        assert [e.key for e in call(one.list, "")] == ["key"]
        assert call(whole.children, "") == ["one-more/", "one/"]
        assert (one.url, whole.url) == (f"s3://{name}/one", f"s3://{name}")
    finally:
        call(one.close)
        call(whole.close)
