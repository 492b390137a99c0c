"""The GCS driver against an emulator."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from typing import Any

import pytest

from det_core.storage._objects._gcs import GcsBucket
from det_core.storage._objects._gcs_errors import Refused
from support.bucket_behaviour import BucketBehaviour, call
from support.processes import free_port
from support.proxy import BUSY, LOST, RESET, TRUNCATED, proxy_before
from support.servers import GcsServer


class TestGcsBucket(BucketBehaviour):
    many = 150  # the emulator has no pages

    @pytest.fixture
    def bucket(self, gcs_server: GcsServer) -> Iterator[GcsBucket]:
        bucket = GcsBucket(gcs_server.make_bucket(), "some/prefix", endpoint_url=gcs_server.url)
        yield bucket
        call(bucket.close)


def refused(bucket: GcsBucket, error: Exception) -> tuple[int | None, str]:
    """How a driver explains an error."""
    found = bucket.explain("write", "one/key", error)
    assert f"checkpoint store {bucket.url}: cannot write one/key: " in str(found) and "\n" not in str(found)
    return found.errno, str(found)


def test_a_missing_bucket(gcs_server: GcsServer) -> None:
    bucket = GcsBucket("no-such-bucket", endpoint_url=gcs_server.url)
    try:
        with pytest.raises(Refused) as caught:
            call(bucket.put, "key", b"data")
        assert not bucket.retryable(caught.value)
        assert refused(bucket, caught.value)[0] == errno.ENOENT
    finally:
        call(bucket.close)


def test_a_server_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    bucket = GcsBucket("name", endpoint_url=url)
    try:
        with pytest.raises(Exception) as caught:
            call(bucket.get, "key")
        number, text = refused(bucket, caught.value)
        assert number == errno.EHOSTUNREACH and f"{url} cannot be reached" in text
        assert bucket.retryable(caught.value)
    finally:
        call(bucket.close)


@pytest.mark.parametrize("fault", [BUSY, RESET, LOST, TRUNCATED])
def test_what_may_pass_is_told(gcs_server: GcsServer, fault: str) -> None:
    name = gcs_server.make_bucket()
    with proxy_before(gcs_server.url) as proxy:
        bucket = GcsBucket(name, endpoint_url=proxy.url)
        proxy.retry_after = "3"
        try:
            proxy.begin(lambda number, request: fault)
            with pytest.raises(Exception) as caught:
                call(bucket.put, "key", b"data")
            assert bucket.retryable(caught.value), repr(caught.value)
            assert bucket.retry_after(caught.value) == (3 if fault == BUSY else None)
            assert refused(bucket, caught.value)[0] == (errno.EAGAIN if fault == BUSY else errno.ECONNRESET)
            proxy.begin()
            call(bucket.put, "key", b"data")
            assert call(bucket.get, "key") == b"data"
        finally:
            call(bucket.close)


def said(status: int, reason: str, message: str = "said") -> Refused:
    """An answer as Google gives it."""
    body = json.dumps({"error": {"code": status, "message": message, "errors": [{"reason": reason}]}})
    return Refused.of(status, body.encode(), None)


@pytest.mark.parametrize(
    ("error", "number", "text", "passes"),
    [
        (said(401, "authError", "Invalid Credentials"), errno.EACCES, "wrong or have expired", True),
        (said(403, "forbidden"), errno.EACCES, "Storage Object Admin on name", False),
        (said(403, "quotaExceeded"), errno.EDQUOT, "the quota is used up", False),
        (said(403, "rateLimitExceeded"), errno.EAGAIN, "asks to slow down", True),
        (said(404, "notFound", "The specified bucket does not exist."), errno.ENOENT, "there is no bucket name", False),
        (said(429, "rateLimitExceeded"), errno.EAGAIN, "asks to slow down", True),
        (Refused.of(503, b"<html>", "7"), errno.EAGAIN, "asks to slow down", True),
        (Refused(0, "the bytes were damaged on their way", damaged=True), errno.EIO, "damaged on their way", True),
    ],
    ids=str,
)
def test_what_a_server_says_is_explained(error: Refused, number: int, text: str, passes: bool) -> None:
    bucket = GcsBucket("name", "prefix")
    found = refused(bucket, error)
    assert found[0] == number and text in found[1]
    assert bucket.retryable(error) is passes


def test_a_listing_has_all_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = GcsBucket("name", "p")
    items = [{"name": f"p/{i}", "size": str(i), "updated": "2026-11-21T12:00:00.5Z"} for i in range(5)]
    asked = []

    async def answer(method: str, path: str, query: dict[str, Any]) -> bytes:  # the emulator has one page
        asked.append(query)
        start = int(query.get("pageToken", 0))
        more = {"nextPageToken": str(start + 2)} if start + 2 < len(items) else {}
        return json.dumps({"items": items[start : start + 2], **more}).encode()

    monkeypatch.setattr(bucket, "_call", answer)
    found = call(bucket.list, "")
    assert [(entry.key, entry.size) for entry in found] == [(str(i), i) for i in range(5)]
    assert found[0].modified == 1795262400.5
    assert [query.get("pageToken") for query in asked] == [None, "2", "4"]
