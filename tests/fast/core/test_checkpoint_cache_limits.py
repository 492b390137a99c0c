"""The cache when it is full, and when the disk fails under it."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from det_core import core
from det_core._env import Environment
from det_core.core._checkpoint import CheckpointCache
from det_core.errors import CheckpointError, DetCoreError, StorageError
from det_core.storage import Disk
from support.caches import SIZE, entries, kept, restored, store
from support.checkpoints import Recorder, alone, tree
from support.disks import FaultyDisk
from support.elsewhere import Elsewhere
from support.threads import as_ranks

T = TypeVar("T")


class TestLimit:
    """What was used least recently goes first."""

    def test_the_oldest_use_goes(self, tmp_path: Path) -> None:
        a, b, c, d = store(tmp_path, *"abcd")
        limit = 3 * SIZE
        for storage_id in (a, b, c, a):
            with restored(tmp_path, storage_id, limit):
                time.sleep(0.01)
        assert kept(tmp_path) == {a, b, c}
        with restored(tmp_path, d, limit):
            assert kept(tmp_path) == {a, c, d}
        with restored(tmp_path, b, limit), restored(tmp_path, a, limit) as (_, elsewhere):
            assert elsewhere.fetched == []
        assert kept(tmp_path) == {a, b, d}

    def test_what_is_in_use_stays(self, tmp_path: Path) -> None:
        a, b, c = store(tmp_path, *"abc")
        with restored(tmp_path, a, SIZE) as (path, _), restored(tmp_path, b, SIZE) as (other, _):
            with restored(tmp_path, c, SIZE):
                assert kept(tmp_path) == {a, b, c}
            assert tree(path)["f0"] == b"a" * 10_000 and tree(other)["f0"] == b"b" * 10_000
            assert kept(tmp_path) == {a, b}
        assert kept(tmp_path) == {a}, "the one left last is the one used last"

    def test_nothing_stays_where_nothing_fits(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "a")
        for limit in (0, SIZE - 1):
            with restored(tmp_path, a, limit) as (path, _):
                assert len(tree(path)) == 11
            assert entries(tmp_path) == []

    def test_a_part_counts_as_what_is_there(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "a")
        cache = CheckpointCache(tmp_path / "cache", SIZE)
        with alone() as distributed:
            context = Recorder().context(
                distributed, tmp_path / "store", store=Elsewhere(tmp_path / "store"), cache=cache
            )
            for name, size in (("f1", 10_000), ("f2", 20_000), ("f1", 20_000)):
                with context.restore_path(a, selector=lambda path, name=name: path == name):  # type: ignore[misc]
                    (entry,) = entries(tmp_path)
                    assert json.loads((entry / "entry.json").read_text())["bytes"] == size

    def test_the_environment_says_where_and_how_much(self, tmp_path: Path) -> None:
        environment = Environment.read({"DET_CORE_HOME": "/home"})
        assert (environment.cache, environment.cache_bytes) == (None, 20 << 30)
        environment = Environment.read({"DET_CORE_CACHE": str(tmp_path), "DET_CORE_CACHE_BYTES": "0"})
        assert (environment.cache, environment.cache_bytes) == (tmp_path, 0)
        for wrong in ("-1", "20G", "1e9", "²"):
            with pytest.raises(ValueError, match=f"DET_CORE_CACHE_BYTES='{wrong}': expected a number of bytes"):
                Environment.read({"DET_CORE_CACHE_BYTES": wrong})


class StickyDisk(Disk):
    """One that removes nothing."""

    def do(self, operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
        if operation == "rename" and ".gone-" in path:
            raise self.error(operation, path, OSError(errno.EPERM, "Operation not permitted"))
        return super().do(operation, path, function, *args)


def test_a_copy_that_cannot_be_removed_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = store(tmp_path, "a", "b")
    with restored(tmp_path, a, SIZE):
        pass
    with restored(tmp_path, b, SIZE, StickyDisk("sticky")) as (path, _):
        assert len(tree(path)) == 11
    assert kept(tmp_path) == {a, b} and "cannot rename" in caplog.text


class SmallDisk(Disk):
    """One that has ``room`` bytes, less what lies in the cache already."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__("small")
        self.folder = folder
        self.room = room

    def do(self, operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
        found: Any = super().do(operation, path, function, *args)
        if function is os.statvfs:
            used = sum(p.stat().st_size for p in self.folder.rglob("f*") if p.is_file())
            fields = [1, 1, 0, 0, self.room - used, 0, 0, 0, 0, 0]
            return os.statvfs_result(fields)  # type: ignore[return-value]
        return found  # type: ignore[no-any-return]


class TestDiskFull:
    """There is no room."""

    def test_older_copies_make_room(self, tmp_path: Path) -> None:
        a, b = store(tmp_path, "a", "b")
        disk = SmallDisk(tmp_path / "cache", SIZE + 5000)
        for storage_id in (a, b):
            with restored(tmp_path, storage_id, 100 * SIZE, disk):
                assert kept(tmp_path) == {storage_id}

    def test_what_does_not_fit_is_one_clear_error(self, tmp_path: Path) -> None:
        a, b = store(tmp_path, "a", "b")
        disk = SmallDisk(tmp_path / "cache", SIZE + 5000)
        with restored(tmp_path, a, 100 * SIZE, disk):
            with pytest.raises(StorageError) as caught, restored(tmp_path, b, 100 * SIZE, disk):
                pass
            assert kept(tmp_path) == {a}
        assert caught.value.errno == errno.ENOSPC
        for text in (f"checkpoint {b} needs {SIZE} bytes", str(tmp_path / "cache"), "5026 are free", "DET_CORE_CACHE"):
            assert text in str(caught.value)

    def test_a_disk_that_fills_up_meanwhile(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "a")

        def work(distributed: core.DistributedContext) -> DetCoreError:
            elsewhere = Elsewhere(tmp_path / "store", disk=FaultyDisk("store"))
            context = Recorder().context(
                distributed, tmp_path / "store", store=elsewhere, cache=CheckpointCache(tmp_path / "cache", SIZE)
            )

            def full(name: str) -> None:
                raise StorageError(
                    errno.ENOSPC, f"checkpoint store s3://x: cannot write {name}: No space left on device"
                )

            if distributed.rank == 1:
                elsewhere.arriving = lambda name: full(name) if elsewhere.fetched else None
            with pytest.raises(StorageError) as caught, context.restore_path(a):
                pass
            return caught.value

        for error in as_ranks(2, work):
            assert error.errno == errno.ENOSPC  # type: ignore[attr-defined]
            assert f"in the cache {tmp_path / 'cache'}" in str(error) and "DET_CORE_CACHE" in str(error)
        assert list(tmp_path.glob("cache/*/aside-*/f*")) == [], "what came is removed, as the disk is full"
        with restored(tmp_path, a, SIZE) as (path, _):
            assert len(tree(path)) == 11


def whatever_call_fails(how: str, tmp_path: Path) -> None:
    """The N-th call to the cache's disk fails, for every N: an error that says so, or none; and nothing is spoiled."""
    a, b = store(tmp_path, "a", "b")
    with restored(tmp_path, b, SIZE):
        pass
    raised = 0
    for at in range(1, 1000):
        disk = FaultyDisk("the cache", at, how)
        try:
            with restored(tmp_path, a, SIZE, disk) as (path, _):
                assert tree(path)["f0"] == b"a" * 10_000 and len(tree(path)) == 11
        except CheckpointError as e:
            raised += 1
            assert isinstance(e, StorageError) and "checkpoint store the cache: cannot " in str(e)
            assert str(tmp_path / "cache") in str(e)
        with restored(tmp_path, b, SIZE) as (path, _):
            assert tree(path)["f0"] == b"b" * 10_000 and len(tree(path)) == 11
        assert kept(tmp_path) == {b}
        if not disk.struck:
            break
    assert raised > 20 and not disk.struck


def test_whatever_call_fails_the_next_job_finds_all(tmp_path: Path) -> None:
    whatever_call_fails("EIO", tmp_path)
