"""The description of a store in a run's record: it opens the store again, without secrets."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from det_core.storage import open_store, storage_without_secrets
from det_core.storage._object_store import ObjectStore


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ("relative/folder", "{cwd}/relative/folder"),
        ("file:///a/b%20c", "/a/b c"),
        ({"type": "shared_fs", "host_path": "/a", "storage_path": "b"}, "/a/b"),
        ("memory://place/prefix", "memory://place/prefix"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        (
            {"type": "s3", "bucket": "b", "prefix": "p", "endpoint_url": "http://me:SECRET@host:1/?key=SECRET",
             "access_key": "SECRET", "secret_key": "SECRET", "session_token": "SECRET", "save_trial_best": 3},
            {"type": "s3", "bucket": "b", "prefix": "p", "endpoint_url": "http://host:1/"},
        ),
        ({"type": "gcs", "bucket": "b", "anonymous": True}, {"type": "gcs", "bucket": "b", "anonymous": True}),
        (
            {"type": "fsspec", "url": "memory://place", "options": {"password": "SECRET"}},
            {"type": "fsspec", "url": "memory://place", "options_left_out": ["password"]},
        ),
        (
            {"type": "fsspec", "url": "memory://place", "options": {"port": 22, "client_kwargs": {
                "endpoint_url": "http://me:SECRET@host:1", "aws_secret_access_key": "SECRET", "ssl": object()}}},
            {"type": "fsspec", "url": "memory://place",
             "options": {"port": 22, "client_kwargs": {"endpoint_url": "http://host:1"}},
             "options_left_out": ["client_kwargs.aws_secret_access_key", "client_kwargs.ssl"]},
        ),
    ],
)  # fmt: skip
def test_storage_without_secrets_opens_the_same_store(
    given: Any, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(given, default=tmp_path)
    found = storage_without_secrets(given, store)
    assert found == (recorded.format(cwd=tmp_path) if isinstance(recorded, str) else recorded)
    assert "SECRET" not in json.dumps(found)
    if "SECRET" not in str(given):
        assert open_store(found, default=tmp_path).root == store.root


def test_store_with_omitted_options_names_them_in_errors(tmp_path: Path) -> None:
    recorded = {"type": "fsspec", "url": "github://org:repo@sha/place", "options_left_out": ["token", "password"]}
    store = open_store(recorded, default=tmp_path, scratch=tmp_path)
    assert isinstance(store, ObjectStore)
    number, text = store.driver.explain_error(PermissionError("denied"))
    assert (number, "leaves out the options token, password: pass checkpoint_storage with them" in text) == (
        errno.EACCES,
        True,
    )


def test_azure_account_is_shown_without_its_key(tmp_path: Path) -> None:
    store = open_store("memory://c/p", default=tmp_path)  # stands for any that is not a directory
    by_key = {"type": "azure", "container": "c", "prefix": "p", "connection_string": "AccountKey=SECRET"}
    assert storage_without_secrets(by_key, store) == store.root
    by_url = {"type": "azure", "container": "c", "account_url": "https://me.blob.core.windows.net/?sig=SECRET",
              "credential": "SECRET"}  # fmt: skip
    assert storage_without_secrets(by_url, store) == {
        "type": "azure", "container": "c", "account_url": "https://me.blob.core.windows.net/",
    }  # fmt: skip


def test_password_in_a_url_is_removed_and_a_container_kept(tmp_path: Path) -> None:
    store = open_store("memory://c/p", default=tmp_path)
    assert storage_without_secrets("sftp://me:SECRET@host/path", store) == "sftp://host/path"
    assert storage_without_secrets("abfs://container@account/path", store) == "abfs://container@account/path"
