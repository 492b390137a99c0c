"""What is wrong with an S3 store, said in one line before training starts."""

from __future__ import annotations

import datetime
import errno
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core._errors import StorageError
from det_core.storage import Store, open_store
from det_core.testing._stores import FILES, stored
from support.buckets import closing
from support.processes import free_port
from support.proxy import BUSY, SILENT, proxy_before
from support.servers import S3Server

Open = Callable[..., Store]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens stores, and closes them at the end."""
    with closing() as close_later:

        def open_it(storage: dict[str, Any]) -> Store:
            store: Store = close_later(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
            return store

        yield open_it


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment and a machine without credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/no/such/file")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def refusal(store: Store, number: int, *words: str) -> str:
    """The one line with which a store is refused."""
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        store.validate()
    text = str(caught.value)
    assert time.monotonic() - began < 30
    assert caught.value.errno == number, text
    assert store.root in text and "\n" not in text
    for word in (*words, ".det_core-tmp"):
        assert word in text, text
    return text


@pytest.mark.rgw
def test_a_wrong_secret(rgw_server: S3Server, opened: Open) -> None:
    storage = rgw_server.storage(rgw_server.make_bucket(), secret_key="not-the-secret")
    text = refusal(opened(storage), errno.EACCES, "the secret key is wrong: correct secret_key")
    assert "not-the-secret" not in text


@pytest.mark.rgw
def test_an_unknown_key(rgw_server: S3Server, opened: Open) -> None:
    storage = rgw_server.storage(rgw_server.make_bucket(), access_key="nobody")
    refusal(opened(storage), errno.EACCES, "does not know the access key id: correct access_key")


def test_a_missing_bucket(s3_server: S3Server, opened: Open) -> None:
    refusal(opened(s3_server.storage("no-such-bucket")), errno.ENOENT, "there is no bucket no-such-bucket: make it")


@pytest.mark.rgw
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_off(rgw_server: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    import botocore.auth

    store = opened(rgw_server.storage(rgw_server.make_bucket()))
    right = botocore.auth.get_current_datetime
    off = datetime.timedelta(hours=hours)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: right(*a, **k) + off)
    refusal(store, errno.EACCES, "clock differs from the server's by more than 15 minutes: set it")


@pytest.mark.rgw
def test_a_key_that_may_only_read_can_restore(
    rgw_server: S3Server, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert rgw_server.gateway is not None
    bucket = rgw_server.make_bucket()
    stored(opened(rgw_server.storage(bucket, "p")), tmp_path, "one")
    rgw_server.gateway.add_user(f"reader-{bucket}", f"key-{bucket}", "secret")
    may = {
        "Effect": "Allow",
        "Principal": {"AWS": [f"arn:aws:iam:::user/reader-{bucket}"]},
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    with rgw_server.client() as client:
        client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [may]}))
    store = opened(rgw_server.storage(bucket, "p", access_key=f"key-{bucket}", secret_key="secret"))
    assert store.newest("run") == "one"
    with caplog.at_level(logging.DEBUG), store.hold("one", _owner()):
        store.open("one").copy_out(tmp_path / "out", [*FILES], [])
    assert (tmp_path / "out" / "model.pt").read_bytes() == FILES["model.pt"]
    refusal(store, errno.EACCES, "the key may not do this", f"s3:PutObject on {bucket}")
    with pytest.raises(StorageError, match="may not do this"):
        stored(store, tmp_path, "two")
    assert [h.storage_id for h in store.list()] == ["one"]


def test_a_server_that_is_not_there(opened: Open) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    storage = {"type": "s3", "bucket": "b", "endpoint_url": url, "access_key": "k", "secret_key": "s"}
    refusal(opened(storage), errno.EHOSTUNREACH, f"{url} cannot be reached")


def test_no_credentials(no_keys: None, opened: Open, moto_server: S3Server) -> None:
    storage = {"type": "s3", "bucket": "b", "endpoint_url": moto_server.url}
    refusal(opened(storage), errno.EACCES, "there are no credentials: give access_key and secret_key")


def test_a_server_that_stays_busy(moto_server: S3Server, opened: Open) -> None:
    bucket = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        proxy.begin(lambda number, request: BUSY)
        store = opened(moto_server.storage(bucket, endpoint_url=proxy.url))
        refusal(store, errno.EAGAIN, "asks to slow down")
        assert len(proxy.requests) > 3, "it was not asked again"


def test_retry_after_is_honoured(moto_server: S3Server, opened: Open) -> None:
    bucket = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        proxy.retry_after = "2"
        proxy.begin(lambda number, request: BUSY if number == 1 else None)
        began = time.monotonic()
        opened(moto_server.storage(bucket, endpoint_url=proxy.url)).validate()
        assert 2 <= time.monotonic() - began < 10


def test_a_server_that_falls_silent_is_given_up(
    moto_server: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.storage._objects._s3.SILENCE", 1.0)
    bucket = moto_server.make_bucket()
    with proxy_before(moto_server.url) as proxy:
        proxy.begin(lambda number, request: SILENT)
        store = opened(moto_server.storage(bucket, endpoint_url=proxy.url))
        refusal(store, errno.ETIMEDOUT, f"{proxy.url} did not answer in time")


def _owner() -> Any:
    from det_core.testing._stores import owner

    return owner()
