"""Errors of an S3 store, in one line before training starts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import StorageError
from det_core.storage import Store, _drivers, open_store
from support.buckets import closing, no_pause
from support.processes import free_port
from support.proxy import BUSY, CONFLICT, SILENT, TOO_MANY, proxy_before
from support.servers import S3Server

__all__ = ["no_pause"]
Open = Callable[..., Store]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Open stores, and close them at the end."""
    with closing() as close_later:

        def open_it(storage: dict[str, Any]) -> Store:
            store: Store = close_later(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
            return store

        yield open_it


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all credentials from the environment and the machine."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/no/such/file")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def refusal(store: Store, number: int, *words: str) -> str:
    """Return the one-line error of a store."""
    with pytest.raises(StorageError) as caught:
        store.check_writable()
    text = str(caught.value)
    assert caught.value.errno == number, text
    assert store.root in text and "\n" not in text
    for word in (*words, "cannot reach the bucket"):
        assert word in text, text
    return text


def test_missing_bucket_is_named(s3_server: S3Server, opened: Open) -> None:
    refusal(opened(s3_server.storage("no-such-bucket")), errno.ENOENT, "s3://no-such-bucket", "make the bucket")


def test_unreachable_server_is_named(opened: Open) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    storage = {"type": "s3", "bucket": "b", "endpoint_url": url, "access_key": "k", "secret_key": "s"}
    refusal(opened(storage), errno.EHOSTUNREACH, url, "is the server up?")


def test_missing_credentials_error_says_what_to_set(no_keys: None, opened: Open, moto_server: S3Server) -> None:
    storage = {"type": "s3", "bucket": "b", "endpoint_url": moto_server.url}
    refusal(opened(storage), errno.EACCES, "give access_key and secret_key")


def test_busy_server_is_an_error_after_few_tries(moto_server: S3Server, opened: Open) -> None:
    bucket = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        proxy.begin(lambda number, request: BUSY)
        store = opened(moto_server.storage(bucket, endpoint_url=proxy.url))
        refusal(store, errno.EAGAIN, "the server is overloaded")
        assert len(proxy.requests) > 2, "it was not asked again"


def test_silent_server_is_an_error_at_the_timeout(
    moto_server: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_drivers.S3_CONFIG, "read_timeout", 1)
    bucket = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        proxy.begin(lambda number, request: SILENT)
        store = opened(moto_server.storage(bucket, endpoint_url=proxy.url))
        refusal(store, errno.ETIMEDOUT, "does not answer")


@pytest.mark.parametrize("fault", [CONFLICT, TOO_MANY])
def test_conflicting_or_throttled_request_is_retried(moto_server: S3Server, opened: Open, fault: str) -> None:
    bucket = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        store = opened(moto_server.storage(bucket, endpoint_url=proxy.url))
        proxy.begin(lambda number, request: fault if number == 1 else None)
        store.check_writable()
        assert proxy.requests[0] == proxy.requests[1]


def test_name_that_the_library_would_change_is_rejected_before_upload(
    moto_server: S3Server, opened: Open, tmp_path: Path
) -> None:
    bucket = moto_server.make_bucket()
    (tmp_path / "file").write_bytes(b"x")
    with proxy_before(moto_server.url) as proxy:
        store = opened(moto_server.storage(bucket, endpoint_url=proxy.url))
        with pytest.raises(StorageError, match=r"cannot write w\?versionId=3: .*another name: rename the file"):
            store.put_file(tmp_path / "file", "w?versionId=3")
        assert not proxy.requests
