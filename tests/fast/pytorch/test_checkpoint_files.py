"""Errors of the disk while a trial's checkpoint is written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from det_core.errors import StorageError  # noqa: E402
from det_core.pytorch._checkpoint import write_files, write_state  # noqa: E402
from support.disks import small_disk  # noqa: E402


def test_full_disk_is_a_storage_error_with_the_path(tmp_path: Path) -> None:
    """torch.save raises a RuntimeError without either over what its file raised."""
    with small_disk(tmp_path / "small", "1m") as disk:
        for name in ("state", "bytes"):
            with pytest.raises(StorageError, match=f"{disk}/{name}: No space left on device") as caught:
                if name == "state":
                    write_state({"weights": torch.ones(1_000_000)}, disk / name)
                else:
                    write_files({name: bytes(2_000_000)}, disk)
            assert caught.value.errno == errno.ENOSPC
            (disk / name).unlink()


def test_names_in_conflict_are_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}/a"):
        write_files({"a": b"", "a/b": b""}, tmp_path)


def test_state_that_cannot_be_pickled_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle") as caught:
        write_state({"code": lambda: 1}, tmp_path / "state")
    assert not isinstance(caught.value, OSError)
