"""Object stores with thousands of files, with large ones, and with every failure of a deletion."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stores.test_checkpoint_retention_objects as retention
from stores.test_checkpoint_objects import kill_one_of_three, opened, share_every_method, storage
from stores.test_checkpoint_retention_objects import memory
from stores.test_object_faults import PERMANENT
from support.checkpoints import STEPS, Recorder, alone, fill

__all__ = ["memory", "opened", "storage"]


def test_four_processes_share_5000_files_and_300_megabytes(storage: dict[str, Any], tmp_path: Path) -> None:
    share_every_method(storage, tmp_path, count=1250, size=75)


def test_rank_killed_during_upload_leaves_nothing_listed(storage: dict[str, Any], tmp_path: Path) -> None:
    kill_one_of_three(storage, tmp_path, count=300)


def test_file_of_300_megabytes_and_empty_file_are_read_back(opened: Callable[[], Any], tmp_path: Path) -> None:
    block = os.urandom(1 << 20)
    source = fill(tmp_path / "source", {"empty": b""})
    with (source / "large").open("wb") as file:
        for i in range(300):
            file.write(block[i:] + block[:i])
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path, store=opened())
        storage_id = context.upload(source, STEPS)
        context.download(storage_id, tmp_path / "target")
        context.close()
    with (tmp_path / "target" / "large").open("rb") as file:
        for i in range(300):
            assert file.read(1 << 20) == block[i:] + block[:i]
        assert file.read() == b""
    assert (tmp_path / "target" / "empty").read_bytes() == b""


@pytest.mark.parametrize("how", PERMANENT)
def test_gc_with_any_failing_call_deletes_no_kept_checkpoint(how: str, memory: Path) -> None:
    retention.test_gc_with_any_failing_call_deletes_no_kept_checkpoint(how, memory)
