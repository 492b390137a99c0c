"""Every single call to an object store fails once in every way, on a disk and on S3, and dies at each."""

from __future__ import annotations

from pathlib import Path

import pytest

import stores.test_object_faults as short
from stores.test_object_faults import PERMANENT, Operation, Place, memory, store_path, upload

__all__ = ["memory"]


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.getfixturevalue("moto_server") if request.param == "s3" else None)


@pytest.mark.parametrize("how", PERMANENT)
@pytest.mark.parametrize("operation", [upload, store_path])
def test_checkpoint_with_any_failing_call_is_registered_or_absent(
    operation: Operation, how: str, place: Place, memory: Path
) -> None:
    short.whole_or_not_there(operation, place, memory, how)


@pytest.mark.parametrize("how", [*PERMANENT, "short"])
def test_download_with_any_failing_call_leaves_whole_files_or_none(how: str, place: Place, memory: Path) -> None:
    short.test_download_with_any_failing_call_leaves_whole_files_or_none(how, place, memory)


@pytest.mark.parametrize("how", PERMANENT)
def test_half_deleted_checkpoint_is_unlisted_and_removed_by_the_next_delete(
    how: str, place: Place, memory: Path
) -> None:
    short.test_half_deleted_checkpoint_is_unlisted_and_removed_by_the_next_delete(how, place, memory)


@pytest.mark.parametrize("how", ["exit", "exit-after"])
@pytest.mark.parametrize("name", ["upload", "store_path", "delete"])
def test_death_at_any_call_leaves_whole_checkpoints(name: str, how: str, place: Place, memory: Path) -> None:
    short.test_death_at_any_call_leaves_whole_checkpoints(name, how, place, memory)
