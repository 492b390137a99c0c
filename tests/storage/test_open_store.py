"""From what a user writes to a store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from det_core.storage import open_store


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
    ],
)
def test_a_directory_is_opened(value: Any, root: str) -> None:
    assert opened(value) == root


def test_a_relative_path_is_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("ckpts", tmp_path)
    monkeypatch.chdir("/")
    assert store.root == str(tmp_path / "ckpts")
    assert not (tmp_path / "ckpts").exists()


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert opened("~/ckpts") == "/home/somebody/ckpts"


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("", "empty"),
        ("s3://bucket/prefix", "s3:// cannot be opened"),
        ("gs://bucket", "gs:// cannot be opened"),
        ("memory://x", "memory:// cannot"),
        ("file://host/data", "file:///absolute/path"),
        ("file:///data?x=1", "file:///absolute/path"),
        ("file:data", "absolute"),
        (7, "not int"),
        ({}, "type is None"),
        ({"type": "s3", "bucket": "b"}, "type is 's3'.*directory and shared_fs"),
        ({"type": ["directory"]}, "type is"),
        ({"type": "directory"}, "container_path is missing"),
        ({"type": "directory", "container_path": None}, "container_path is None"),
        ({"type": "directory", "container_path": "relative"}, "container_path is 'relative'.*absolute"),
        ({"type": "directory", "container_path": "/d", "bucket": "b"}, "bucket is no key of type directory"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "../x"}, "storage_path is '../x'.*inside"),
        ({"type": "shared_fs", "host_path": "/a/b", "storage_path": "/a/bc"}, "storage_path is '/a/bc'.*inside"),
        ({"type": "shared_fs", "host_path": "/data", "save_trial_best": -1}, "save_trial_best is -1"),
        ({"type": "shared_fs", "host_path": "/data", "save_trial_best": True}, "save_trial_best is True"),
    ],
)
def test_what_cannot_be_opened_is_refused(value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        opened(value)


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        opened({"type": "shared_fs", "storage_path": 5, "bucket": "b", "save_trial_latest": "x"})
    for text in ("host_path is missing", "storage_path is 5", "bucket is no key", "save_trial_latest is 'x'"):
        assert re.search(text, str(caught.value)), text
