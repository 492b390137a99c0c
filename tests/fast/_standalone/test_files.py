"""Files that a reader finds whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from det_core._standalone import files


def test_write_atomic_replaces_content_and_syncs_file_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", list[str]()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    path.write_bytes(b"before")
    files.write_atomic(path, b"after" * 100_000, mode=0o600)
    assert path.read_bytes() == b"after" * 100_000
    assert len(synced) == 2 and synced[0].endswith(files.STAGING_SUFFIX) and synced[1] == str(tmp_path)
    assert os.listdir(tmp_path) == ["file"] and path.stat().st_mode & 0o777 == 0o600
    files.write_atomic(path, b"soon", durable=False)
    assert path.read_bytes() == b"soon" and len(synced) == 2


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_write_atomic_with_a_failing_call_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(path, b"after")
    monkeypatch.undo()
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]
    files.write_atomic(path, b"after")
    assert path.read_bytes() == b"after"


def test_replacing_from_two_writers_keeps_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.replacing(path) as first, files.replacing(path) as second:
        Path(first).write_bytes(b"first")
        Path(second).write_bytes(b"second")
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]


def test_replacing_with_a_block_that_raises_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as staging:
        Path(staging).write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]
