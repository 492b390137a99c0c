"""The S3 driver against moto; in ``tests/stores`` against Ceph's gateway too."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core.storage._objects._bucket import KeyMissing
from det_core.storage._objects._s3 import S3Bucket
from det_core.storage._objects._s3_session import new_session
from support.bucket_behaviour import BucketBehaviour, call
from support.proxy import MOVED, proxy_before
from support.servers import S3Server


def opened(server: S3Server, bucket: str, prefix: str = "", **changes: str) -> S3Bucket:
    """A driver with the server's keys."""
    options = {"endpoint_url": server.url, "access_key": server.access_key, "secret_key": server.secret_key, **changes}
    return S3Bucket(bucket, prefix, **options)


class OnS3(BucketBehaviour):
    @pytest.fixture
    def bucket(self, server: S3Server) -> Iterator[S3Bucket]:
        bucket = opened(server, server.make_bucket(), "some/prefix")
        yield bucket
        call(bucket.close)


class TestS3Bucket(OnS3):
    many = 150  # several pages: on Ceph's gateway

    @pytest.fixture
    def server(self, moto_server: S3Server) -> S3Server:
        return moto_server


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


def test_after_a_redirect_the_client_sends_everything(moto_server: S3Server) -> None:
    name = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        bucket = opened(moto_server, name, endpoint_url=proxy.url)
        try:
            call(bucket.put, "before", b"0")
            proxy.begin(lambda number, request: MOVED if number == 1 else None)
            call(bucket.put, "key", b"1")
            assert len(proxy.requests) == 2
            assert call(bucket.get, "key") == b"1" and call(bucket.get, "key", 0, 1) == b"1"
            with pytest.raises(KeyMissing):
                call(bucket.get, "none")
            assert call(bucket.get, "key", 1, 2) == b""
            data = bytes(range(256)) * (1 << 14) * 2
            upload = call(bucket.begin_parts, "large", len(data) + 1)
            tags = [call(bucket.put_part, upload, 1, memoryview(data)), call(bucket.put_part, upload, 2, b"x")]
            call(bucket.finish_parts, upload, tags)
            assert call(bucket.get, "large") == data + b"x"
            assert [(e.key, e.size) for e in call(bucket.list, "k")] == [("key", 1)]
        finally:
            call(bucket.close)


def test_a_listing_that_is_wanted_elsewhere_begins_anew(moto_server: S3Server) -> None:
    name = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        bucket = opened(moto_server, name, "some/prefix", endpoint_url=proxy.url)
        try:
            call(bucket.put, "key", b"1")
            proxy.begin(lambda number, request: MOVED if number == 1 else None)
            assert [(e.key, e.size) for e in call(bucket.list, "")] == [("key", 1)]
            assert len(proxy.requests) == 2
        finally:
            call(bucket.close)


def test_a_public_bucket_needs_no_keys(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    name = moto_server.make_bucket()
    with moto_server.client() as client:
        client.put_object(Bucket=name, Key="key", Body=b"data", ACL="public-read")
    bucket = S3Bucket(name, endpoint_url=moto_server.url, anonymous=True)
    try:
        assert call(bucket.get, "key") == b"data"
    finally:
        call(bucket.close)


@pytest.mark.parametrize(
    ("code", "status", "number", "text", "passes"),
    [
        ("ExpiredToken", 400, errno.EACCES, "the session token has expired", False),
        ("SlowDown", 503, errno.EAGAIN, "asks to slow down", True),
        ("Throttling", 429, errno.EAGAIN, "asks to slow down", True),
        ("InternalError", 500, errno.EIO, "the server refused", True),
        ("QuotaExceeded", 403, errno.EDQUOT, "the quota is used up", False),
        ("PermanentRedirect", 301, errno.EINVAL, "set its region", False),
        ("BadDigest", 400, errno.EIO, "damaged on their way", True),
        ("AccessDenied", 403, errno.EACCES, "s3:PutObject on name", False),
        ("500", 500, errno.EIO, "the server refused", True),
        ("507", 507, errno.ENOSPC, "the store is full", False),
        ("Unheard", 400, errno.EIO, "the server refused (Unheard: said)", False),
    ],
)
def test_what_a_server_says_is_explained(code: str, status: int, number: int, text: str, passes: bool) -> None:
    from botocore.exceptions import ClientError

    bucket = S3Bucket("name", "prefix")
    about = {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "7"}}
    error = ClientError({"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": about}, "PutObject")
    found = bucket.explain("write", "one/model.pt", error)
    assert found.errno == number
    assert "checkpoint store s3://name/prefix: cannot write one/model.pt: " in str(found) and text in str(found)
    assert bucket.retryable(error) is passes
    assert bucket.retry_after(error) == 7


def test_what_botocore_ships_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = new_session(), new_session()
    assert one.get_component("data_loader") is two.get_component("data_loader")
    assert one.get_component("credential_provider") is not two.get_component("credential_provider")
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    assert str(tmp_path) in new_session().get_component("data_loader").search_paths
    assert str(tmp_path) not in one.get_component("data_loader").search_paths
