"""Collection of a failed save in an object store by the same process."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core.errors import StorageError
from support.buckets import contents, keys, object_store
from support.store_suite import commit_path, owner


def test_objects_of_a_failed_save_are_collected_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = object_store(f"memory://{tmp_path.name}/failed", tmp_path / "scratch")
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    staging.seal(staging.scan_written())
    with monkeypatch.context() as patched:
        patched.setattr(store.driver, "remove", _refuse)
        with pytest.raises(StorageError, match="denied"):
            staging.abort()
    assert "one/file" in keys(store)
    second = store.begin("two", owner())
    (second.path / "file").write_text("ours")
    commit_path(second)
    assert {key.partition("/")[0] for key in contents(store)} == {"two"}


def _refuse(batch: list[str]) -> None:
    raise PermissionError("denied")
