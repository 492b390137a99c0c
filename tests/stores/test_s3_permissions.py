"""Errors of keys and clock of an S3 store, in one line, by a server that checks them."""

from __future__ import annotations

import datetime
import errno
import json
import logging
from pathlib import Path

import pytest

from det_core.errors import StorageError
from fast.storage.test_s3_errors import Open, opened, refusal, test_missing_bucket_is_named
from support.servers import S3Server
from support.store_suite import FILES, owner, stored

__all__ = ["opened", "test_missing_bucket_is_named"]


def test_wrong_secret_key_is_named(rgw_server: S3Server, opened: Open) -> None:
    storage = rgw_server.storage(rgw_server.make_bucket(), secret_key="not-the-secret")
    text = refusal(opened(storage), errno.EACCES, "correct secret_key")
    assert "not-the-secret" not in text


def test_unknown_access_key_is_named(rgw_server: S3Server, opened: Open) -> None:
    storage = rgw_server.storage(rgw_server.make_bucket(), access_key="nobody")
    refusal(opened(storage), errno.EACCES, "correct access_key")


@pytest.mark.parametrize("hours", [-1, 1])
def test_wrong_clock_is_named(rgw_server: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    import botocore.auth

    store = opened(rgw_server.storage(rgw_server.make_bucket()))
    right = botocore.auth.get_current_datetime
    off = datetime.timedelta(hours=hours)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: right(*a, **k) + off)
    refusal(store, errno.EACCES, "set this machine's clock")


def test_read_only_key_can_restore(
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
    assert store.list("run")[-1].storage_id == "one"
    with caplog.at_level(logging.DEBUG), store.read_lease("one", owner()):
        store.open("one").copy_to(tmp_path / "out", [*FILES], [])
    assert (tmp_path / "out" / "model.pt").read_bytes() == FILES["model.pt"]
    with pytest.raises(StorageError, match=r"cannot write .*PutObject.*ask for a policy") as caught:
        store.check_writable()
    assert caught.value.errno == errno.EACCES and "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="ask for a policy"):
        stored(store, tmp_path, "two")
    assert [h.storage_id for h in store.list()] == ["one"]
