"""Tests of what knows torch."""

from pathlib import Path

import pytest

from support.torch_once import an_optimizer

__all__ = ["an_optimizer"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory: a checkpoint has its code, which would be all of det_core and its tests."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
