"""Errors of a directory that cannot be a store, and files beside checkpoints."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.errors import StorageError
from det_core.storage import DirectoryStore, Disk, Owner
from support.disks import FaultyDisk


def as_nobody(work: Callable[[], object]) -> str:
    """Return the message that ``work`` raises in a process without any special right."""
    if os.geteuid() != 0:
        try:
            work()
        except StorageError as e:
            return str(e)
        raise AssertionError("nothing was raised")
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            work()
        except StorageError as e:
            os.write(write, str(e).encode())
        except BaseException as e:
            print(e, file=sys.stderr)
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as pipe:
        return pipe.read().decode()


def check(said: str, *parts: str) -> None:
    """One line, with all that it has to say."""
    assert said and "\n" not in said
    for part in parts:
        assert part in said, f"{part!r} is not in: {said}"


class TestValidate:
    def test_check_writable_creates_root_and_leaves_no_probe(self, tmp_path: Path) -> None:
        store = DirectoryStore(tmp_path / "a" / "b")
        store.check_writable()
        assert [path.name for path in (tmp_path / "a" / "b").rglob("*")] == [".det_core-tmp"]

    def test_check_writable_of_a_file_names_it(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(StorageError) as caught:
                DirectoryStore(path).check_writable()
            check(str(caught.value), str(path), f"{tmp_path / 'file'} is not a directory", "checkpoint_storage")

    def test_check_writable_without_permission_names_user_and_directory(self, tmp_path: Path) -> None:
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(0o755)
        (tmp_path / "locked").mkdir()
        (tmp_path / "locked").chmod(0o555)
        for path in (tmp_path / "locked", tmp_path / "locked" / "new"):
            said = as_nobody(DirectoryStore(path).check_writable)
            check(said, str(path), "Permission denied", "(user ", f"write to {tmp_path / 'locked'}")

    @pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO])
    def test_check_writable_with_an_errno_has_its_text(self, number: int, tmp_path: Path) -> None:
        class Refusing(Disk):
            def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
                if operation == "write":
                    raise self.error(operation, path, OSError(number, os.strerror(number)))
                return super().do(operation, path, function, *args)

        with pytest.raises(StorageError) as caught:
            DirectoryStore(tmp_path, disk=Refusing(str(tmp_path))).check_writable()
        assert caught.value.errno == number
        check(str(caught.value), "cannot write", str(tmp_path), os.strerror(number), "pass another directory")
        assert list((tmp_path / ".det_core-tmp").iterdir()) == []

    def test_check_writable_with_changed_bytes_raises(self, tmp_path: Path) -> None:
        class Lying(Disk):
            def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
                found = super().do(operation, path, function, *args)
                return found[::-1] if operation == "read" else found

        with pytest.raises(StorageError, match="cannot read back"):
            DirectoryStore(tmp_path, disk=Lying("here")).check_writable()

    def test_check_writable_with_any_failing_call_raises(self, tmp_path: Path) -> None:
        for at in range(1, 100):
            disk = FaultyDisk(str(tmp_path), at)
            try:
                DirectoryStore(tmp_path / str(at) / "store", disk=disk).check_writable()
            except StorageError as e:
                check(str(e), str(tmp_path), "cannot ")
            else:
                assert not disk.struck
                assert at > 10
                return
        raise AssertionError("it never gets through")


class TestInit:
    """``core.init(check_storage=True)``."""

    def test_init_with_unusable_store_creates_no_run(self, home: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError, match="is not a directory"):
            core.init(checkpoint_storage=tmp_path / "file", check_storage=True)
        assert not (home / "runs").exists()

    def test_init_with_unusable_store_raises_on_every_rank(self, home: Path, tmp_path: Path) -> None:
        from support.threads import as_ranks

        (tmp_path / "file").write_text("x")

        def rank(distributed: core.DistributedContext) -> str:
            with pytest.raises(StorageError) as caught:
                core.init(distributed=distributed, checkpoint_storage=tmp_path / "file", check_storage=True)
            return str(caught.value)

        chief, *workers = as_ranks(3, rank)
        check(chief, "is not a directory")
        assert workers == [chief.replace("checkpoint store", "rank 0: checkpoint store", 1)] * 2

    @pytest.mark.parametrize("chosen", [True, False])
    def test_a_store_that_works(self, chosen: bool, tmp_path: Path) -> None:
        storage = tmp_path / "store" if chosen else None
        with core.init(checkpoint_storage=storage, check_storage=True) as ctx:
            with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, _):
                (path / "x").write_text("x")

    def test_init_without_check_reads_from_an_unwritable_store(self, tmp_path: Path) -> None:
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(0o755)
        with core.init(checkpoint_storage=tmp_path / "store") as ctx:
            with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
                (path / "x").write_text("x")
        for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        store = DirectoryStore(tmp_path / "store")

        def read() -> None:
            with store.read_lease(storage_id, Owner.current("run", 0)):
                checkpoint = store.open(storage_id)
                checkpoint.check(checkpoint.manifest.files)
            store.check_writable()

        try:
            check(as_nobody(read), "Permission denied", "(user ")
        finally:
            for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
                path.chmod(0o755)


def test_put_file_outside_the_root_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("x")
    store = DirectoryStore(tmp_path / "store")
    for name in ("", "/etc/x", "../x", "a/../../x", ".det_core-tmp/x", "a//b"):
        with pytest.raises(ValueError, match="not a path below"):
            store.put_file(tmp_path / "source", name)
    assert not (tmp_path / "store").exists()


def test_put_file_with_a_failing_call_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new" * 1000)
    for at in range(1, 100):
        root = tmp_path / str(at)
        DirectoryStore(root).put_file(tmp_path / "old", "tensorboard/events")
        disk = FaultyDisk(str(root), at)
        try:
            DirectoryStore(root, disk=disk).put_file(tmp_path / "new", "tensorboard/events")
        except StorageError as e:
            check(str(e), str(tmp_path), "cannot ")
        assert (root / "tensorboard" / "events").read_bytes() in (b"old", b"new" * 1000)
        if disk.struck not in ("remove", ""):
            assert list((root / ".det_core-tmp").iterdir()) == []
        if not disk.struck:
            return
    raise AssertionError("it never gets through")


def test_old_probe_is_collected(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.check_writable()
    for name in ("probe.1", "beside.1", "probe.2"):
        (tmp_path / ".det_core-tmp" / name).write_text("x")
    for name in ("probe.1", "beside.1"):
        os.utime(tmp_path / ".det_core-tmp" / name, (0, 0))
    store.collect()
    assert [path.name for path in (tmp_path / ".det_core-tmp").iterdir()] == ["probe.2"]


def test_lease_of_another_host_is_valid_for_a_day(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.check_writable()
    away = Owner(**{**vars(Owner.current("run", 0)), "host": "0" * 12})
    with store.read_lease("one", away):
        assert store.in_use() == {"one"}
        (mark,) = (tmp_path / ".det_core-tmp").iterdir()
        os.utime(mark, (mark.stat().st_mtime - 23 * 3600,) * 2)
        assert store.in_use() == {"one"}
        os.utime(mark, (mark.stat().st_mtime - 2 * 3600,) * 2)
        assert store.in_use() == set()
        store.collect()
        assert not mark.exists()
