"""From what a user writes to a store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import MissingExtra, StorageError
from det_core.storage import Owner, open_store
from det_core.storage._object_store import ObjectStore


def opened(value: Any) -> str:
    return open_store(value, Path("/the/default")).root


@pytest.mark.parametrize(
    ("value", "root"),
    [
        (None, "/the/default"),
        ("/data/ckpts", "/data/ckpts"),
        ("/data//ckpts/", "/data/ckpts"),
        (Path("/data"), "/data"),
        ("file:///data/a%20b", "/data/a b"),
        ("file://localhost/data", "/data"),
        ({"type": "directory", "container_path": "/data"}, "/data"),
        ({"type": "shared_fs", "host_path": "/data"}, "/data"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "a/b"}, "/data/a/b"),
        ({"type": "shared_fs", "host_path": "/data/", "storage_path": "/data/x"}, "/data/x"),
        ({"type": "shared_fs", "host_path": "/", "storage_path": "x"}, "/x"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": None, "save_trial_best": 2}, "/data"),
        ({"type": "shared_fs", "host_path": "/data", "propagation": "rprivate", "checkpoint_path": "c"}, "/data"),
    ],
)
def test_open_store_with_a_path_returns_its_directory(value: Any, root: str) -> None:
    assert opened(value) == root


def test_open_store_with_a_relative_path_uses_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("ckpts", tmp_path)
    monkeypatch.chdir("/")
    assert store.root == str(tmp_path / "ckpts")
    assert not (tmp_path / "ckpts").exists()


def test_open_store_expands_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert opened("~/ckpts") == "/home/somebody/ckpts"


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("", "empty"),
        ("file://host/data", "file:///absolute/path"),
        ("file:///data?x=1", "file:///absolute/path"),
        ("file:data", "absolute"),
        (7, "not int"),
        ({}, "type is None"),
        ({"type": "tape"}, "type is 'tape'.*directory, shared_fs, s3, gcs, azure, fsspec"),
        ({"type": ["directory"]}, "type is"),
        ({"type": "directory"}, "container_path is missing"),
        ({"type": "directory", "container_path": None}, "container_path is missing"),
        (
            {"type": "directory", "container_path": "/d", "bucket": "b"},
            "bucket: unknown key for type directory",
        ),
        ({"type": "directory", "container_path": "~/d"}, "absolute"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "../x"}, "storage_path must lie inside host_path"),
        ({"type": "shared_fs", "host_path": "/a/b", "storage_path": "/a/bc"}, "storage_path must lie inside"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://bucket/a/../b", "cannot hold '..'"),
        ("s3:/bucket/p", "two slashes, s3://"),
        ("s3://bucket/p?endpoint_url=http://x", "no more.*'type': 's3'"),
        ("gs://bucket#x", "no more"),
        ("simplecache::s3://bucket", "no more"),
        ("carrier+pigeon://x", "no more"),
        ("pigeon://x", "no driver for pigeon://; fsspec knows .*memory"),
        ({"type": "s3"}, "bucket is missing"),
        ({"type": "s3", "bucket": ""}, "bucket is missing"),
        ({"type": "s3", "bucket": "b/c"}, "bucket must be a bare name"),
        ({"type": "s3", "bucket": "b", "endpoint_url": "host:80"}, "begins with http://"),
        ({"type": "s3", "bucket": "b", "access_key": "k"}, "belong together"),
        ({"type": "s3", "bucket": "b", "anonymous": "yes"}, "anonymous must be true or false"),
        ({"type": "gcs", "bucket": "b", "access_key": "k"}, "access_key: unknown key for type gcs; allowed: bucket, "),
        ({"type": "azure", "container": "c"}, "exactly one of connection_string and account_url"),
        ({"type": "azure", "container": "c", "connection_string": "x", "account_url": "https://a"}, "exactly one"),
        (
            {"type": "azure", "container": "c", "connection_string": "x", "credential": "y"},
            "used with account_url",
        ),
        ({"type": "fsspec", "url": "no url"}, "url must be one of a protocol"),
    ],
)
def test_open_store_with_invalid_value_is_rejected(value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        opened(value)


def test_open_store_names_every_wrong_key() -> None:
    with pytest.raises(ValueError) as caught:
        opened({"type": "shared_fs", "storage_path": 5, "bucket": "b"})
    for text in ("host_path is missing", "storage_path must be a text", "bucket: unknown key"):
        assert re.search(text, str(caught.value)), text


@pytest.mark.parametrize(
    ("value", "root"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket//a/./b//", "s3://bucket/a/b"),
        ("s3a://bucket/prefix", "s3://bucket/prefix"),
        ({"type": "s3", "bucket": "bucket", "prefix": "/a/", "save_trial_best": 1}, "s3://bucket/a"),
        ({"type": "s3", "bucket": "b", "endpoint_url": "http://127.0.0.1:1", "region": "r"}, "s3://b"),
        ({"type": "s3", "bucket": "b", "access_key": "k", "secret_key": "s", "session_token": "t"}, "s3://b"),
        ("gs://bucket/prefix", "gs://bucket/prefix"),
        ("gcs://bucket/prefix/", "gs://bucket/prefix"),
        ({"type": "gcs", "bucket": "bucket", "prefix": None}, "gs://bucket"),
        ("memory://a/b", "memory://a/b"),
        ({"type": "fsspec", "url": "memory://a/b/", "options": {}}, "memory://a/b"),
    ],
)
def test_open_store_of_objects_makes_no_request(value: Any, root: str) -> None:
    store = open_store(value, Path("/the/default"))
    assert isinstance(store, ObjectStore)
    assert store.root == root
    store.close()


def test_open_store_uses_the_given_scratch_directory(tmp_path: Path) -> None:
    store = open_store("memory://scratched", tmp_path, scratch=tmp_path / "scratch")
    staging = store.begin("one", Owner.current("run", 0))
    assert staging.path.is_relative_to(tmp_path / "scratch")
    staging.abort()
    store.close()
    assert not any((tmp_path / "scratch").rglob("*.*/*"))


SECRETS = [
    {"type": "s3", "bucket": "b", "access_key": "open", "secret_key": "sesame", "session_token": "abracadabra"},
    {"type": "fsspec", "url": "ftp://open:sesame@127.0.0.1:1/a", "options": {}},
    {"type": "fsspec", "url": "memory://a", "options": {"password": "sesame"}},
]


@pytest.mark.parametrize("value", SECRETS)
def test_store_repr_and_root_contain_no_secret(value: dict[str, Any]) -> None:
    store = open_store(value, Path("/the/default"))
    assert isinstance(store, ObjectStore)
    with pytest.raises(StorageError, match="cannot read x") as told, store._translating_errors("read", "x"):
        raise RuntimeError("sesame")
    for text in (repr(store), store.root, str(told.value)):
        assert "sesame" not in text
        assert "abracadabra" not in text
    store.close()


@pytest.mark.parametrize(
    "value",
    [
        "s3://key:sesame@bucket/x",
        "s3://bucket/x?secret_key=sesame",
        "ftp://open:sesame@host/x?y",
        {"type": "s3", "bucket": "b", "access_key": "k", "secret_key": ["sesame"]},
        {"type": "azure", "container": "c", "connection_string": ["sesame"]},
        {"type": "fsspec", "url": "sesame", "options": "sesame"},
    ],
)
def test_store_errors_contain_no_secret(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        opened(value)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "command"),
    [
        ("az://container/prefix", r"pip install .*\[azure\]'"),
        ({"type": "azure", "container": "c", "account_url": "https://a.blob.core.windows.net"}, "azure"),
        ("s3://bucket", r"pip install .*\[s3\]'"),
        ("gs://bucket", r"pip install .*\[gcs\]'"),
        ("sftp://host/path", "pip install paramiko"),
    ],
)
def test_missing_driver_error_has_its_install_command(
    value: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("adlfs", "s3fs", "gcsfs", "gcsfs.core", "paramiko"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(MissingExtra, match=command):
        opened(value)


def test_directory_store_imports_no_driver() -> None:
    code = (
        "import sys; from pathlib import Path; from det_core.storage import open_store; open_store('/x', Path('/y'))\n"
        "print(sorted({'fsspec', 's3fs', 'gcsfs', 'aiobotocore', 'asyncio'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
