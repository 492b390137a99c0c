"""Where the checkpoint lies that a trial is to start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core._env import Environment
from det_core.core._managed_storage import open_start_store
from det_core.errors import CheckpointError
from det_core.storage import DirectoryStore


def test_open_start_store_opens_other_storage_only(tmp_path: Path) -> None:
    own, environment = DirectoryStore(tmp_path / "own"), Environment.read()
    assert open_start_store(None, None, own, environment) == open_start_store("a", None, own, environment) == {}
    same = {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "own"}
    assert open_start_store("a", same, own, environment) == {}
    (store,) = open_start_store(
        "a", {"type": "directory", "container_path": str(tmp_path / "b")}, own, environment
    ).values()
    assert store.root == str(tmp_path / "b")


def test_open_start_store_failure_names_checkpoint(tmp_path: Path) -> None:
    settings = {"type": "fsspec", "url": "nosuch://place/prefix"}
    with pytest.raises(CheckpointError, match=r"^cannot open the storage of checkpoint abc, .*nosuch") as error:
        open_start_store("abc", settings, DirectoryStore(tmp_path), Environment.read())
    assert "\n" not in str(error.value)
