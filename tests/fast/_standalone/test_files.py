"""Files that a reader finds whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from det_core._standalone import files


def test_content_is_replaced_in_one_step_and_synced_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", list[str]()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    path.write_bytes(b"before")
    files.write_whole(str(path), b"after" * 100_000)
    assert path.read_bytes() == b"after" * 100_000
    assert synced == [f"{path}.new", str(tmp_path)]
    assert os.listdir(tmp_path) == ["file"] and path.stat().st_mode & 0o777 == 0o600
    files.write_whole(str(path), b"soon", durable=False)
    assert path.read_bytes() == b"soon" and len(synced) == 2


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_call_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(str(path), b"after")
    monkeypatch.undo()
    assert path.read_bytes() == b"before"
    files.write_whole(str(path), b"after")
    assert path.read_bytes() == b"after"
