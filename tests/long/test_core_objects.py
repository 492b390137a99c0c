"""Checkpoints of thousands of files, and of hundreds of megabytes, on object stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stores.test_checkpoint_objects import a_rank_that_is_killed, four_processes, storage

__all__ = ["storage"]


def test_four_processes_share_5000_files_and_300_megabytes(storage: dict[str, Any], tmp_path: Path) -> None:
    four_processes(storage, 1250, 75, tmp_path)


def test_a_rank_that_is_killed_while_it_uploads(storage: dict[str, Any], tmp_path: Path) -> None:
    a_rank_that_is_killed(storage, 300, tmp_path)
