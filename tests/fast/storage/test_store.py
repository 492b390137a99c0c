"""Behaviour that all stores share: listing, leases of dead processes, messages; on a directory and on objects."""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, MissingExtra, StorageError
from det_core.storage import DirectoryStore, Disk, FileEntry, Manifest, Owner, Store, open_store
from det_core.storage._object_store import ObjectStore
from support.buckets import Around, FaultyDriver, closing, object_store, put
from support.servers import S3Server
from support.store_suite import FILES, METADATA, fill, header, owner, stored

AWAY = Owner(**{**vars(owner()), "host": "0" * 12})


@pytest.fixture(params=["directory", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "store")
        return
    with closing() as opened:
        yield opened(object_store(f"memory:/{tmp_path}/store", tmp_path / "scratch"))


def later(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """Let time pass."""
    for name, now in (("now", time.time()), ("monotonic", time.monotonic())):
        monkeypatch.setattr(f"det_core._clock.{name}", lambda then=now + hours * 3600: then)


# Listing.


class Reading:
    """A store of manifests of 5,000 files each, and how many bytes were read."""

    def __init__(self, kind: str, folder: Path, count: int) -> None:
        self.bytes = 0
        manifest = Manifest(
            {f"folder/file-{i}": FileEntry(4096, (f"{i:032x}",)) for i in range(5000)}, (), header("x", run_id="other")
        )
        self.text = manifest.encode()
        if kind == "directory":
            self.store: Store = DirectoryStore(folder, disk=self._disk())
        else:
            plain = object_store(f"memory:/{folder}", folder / "scratch")
            self.store = ObjectStore(self._driver(plain), folder / "scratch")
        for number in range(count):
            self.put(f"c{number}", self.text)
        self.put("ours", Manifest({"f": FileEntry(1, ("0" * 32,))}, (), header("ours")).encode())

    def put(self, storage_id: str, text: bytes) -> None:
        self.store._write(f"{storage_id}/.det_core/manifest.json", text)

    def _disk(self) -> Disk:
        outer = self

        class Counting(Disk):
            def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
                found = super().do(operation, path, function, *args)
                outer.bytes += len(found) if operation == "read" else 0
                return found

        return Counting("store")

    def _driver(self, plain: ObjectStore) -> Around:
        outer = self

        class Counting(Around):
            def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
                found = call(*args)
                outer.bytes += len(found) if operation == "read" else 0
                return found

        return Counting(plain.driver)


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_list_reads_each_manifest_header_once(kind: str, tmp_path: Path) -> None:
    reading = Reading(kind, tmp_path, count=20)
    assert len(reading.text) > 400_000
    assert reading.store.list("run")[-1].storage_id == "ours"
    assert reading.bytes < 20 * 8192 + 8192
    read = reading.bytes
    assert reading.store.list("run")[-1].storage_id == "ours"
    assert reading.bytes == read, "a header never changes"


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_torn_large_manifest_is_not_listed(kind: str, tmp_path: Path) -> None:
    reading = Reading(kind, tmp_path, count=1)
    reading.put("torn", reading.text[: len(reading.text) // 2])
    assert [found.storage_id for found in reading.store.list()] == ["c0", "ours"]


class Unreadable(Disk):
    """A disk of which nothing below one folder can be read, as where its mode is 0700 or a sector is bad."""

    def __init__(self, folder: str) -> None:
        super().__init__("store")
        self.folder = folder

    def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if path.startswith(self.folder):
            raise self.error(operation, path, PermissionError(errno.EACCES, "Permission denied"))
        return super().do(operation, path, function, *args)


@pytest.mark.parametrize("what", ["no permission", "folder as manifest", "link to itself", "object"])
def test_list_warns_of_unreadable_checkpoints_and_omits_them(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store: Store = DirectoryStore(tmp_path / "store")
    stored(store, tmp_path, "mine")
    theirs = tmp_path / "store" / "theirs"
    if what == "no permission":
        stored(store, tmp_path, "theirs", run_id="other")
        store = DirectoryStore(tmp_path / "store", disk=Unreadable(str(theirs)))
    elif what == "folder as manifest":
        (theirs / ".det_core" / "manifest.json").mkdir(parents=True)
    elif what == "link to itself":
        theirs.symlink_to("theirs")
    else:
        plain = object_store(f"memory:/{tmp_path}/objects", tmp_path / "scratch")
        for name in ("mine", "theirs"):
            stored(plain, tmp_path, name)
        store = ObjectStore(Forbidden(plain.driver), tmp_path / "scratch")
    assert [found.storage_id for found in store.list("run")] == ["mine"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("not listed: ") and "theirs" in told
    with pytest.raises(StorageError, match="theirs"):
        store.open("theirs")


class Forbidden(Around):
    """A service that refuses to give one checkpoint."""

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        if operation == "read" and key.startswith("theirs/"):
            raise PermissionError(errno.EACCES, "Access Denied")
        return call(*args)


def test_checkpoint_deleted_through_another_store_is_not_listed(tmp_path: Path) -> None:
    store, other = DirectoryStore(tmp_path / "store"), DirectoryStore(tmp_path / "store")
    for name in ("one", "two"):
        stored(store, tmp_path, name)
    assert len(store.list()) == 2
    other.delete("one")
    assert [found.storage_id for found in store.list()] == ["two"]


def test_unverified_checkpoint_is_logged_once(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if isinstance(store, ObjectStore):
        put(store, "theirs/model.pt")
    else:
        fill(tmp_path / "store" / "theirs")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            store.open("theirs").metadata()
    assert len([record for record in caplog.records if "unverified" in record.message]) == 1


# Writers and deleters that are gone.


def test_files_of_a_remote_writer_are_collected_after_a_day(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = store.begin("one", AWAY)
    fill(staging.path)
    files = staging.seal(staging.scan_written())
    later(monkeypatch, 23)
    assert store.collect() == []
    later(monkeypatch, 25)
    assert store.collect() == ["one"]
    with pytest.raises(CheckpointError, match="one cannot be saved: its files were removed meanwhile"):
        staging.commit(files, [], METADATA, header("one"))
    staging.abort()
    assert store.list() == []
    with pytest.raises(CheckpointNotFound):
        store.open("one")


def test_writer_renews_its_lease(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = store.begin("one", AWAY)
    fill(staging.path)
    before = store._list_leases()
    for name in before:
        if isinstance(store, DirectoryStore):
            os.utime(tmp_path / "store" / ".det_core-tmp" / name, (0, 0))
    passed = 3700 + time.monotonic()
    monkeypatch.setattr("det_core._clock.monotonic", lambda: passed)
    files = staging.seal(staging.scan_written())
    assert max(store._list_leases().values()) < 3600
    assert store.collect() == []
    staging.commit(files, [], METADATA, header("one"))
    store.open("one").check(FILES)


@pytest.mark.parametrize("step", ["put", "commit"])
def test_writer_whose_lease_was_collected_fails_to_commit(
    store: Store, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = store.begin("one", owner())
    fill(staging.path)
    listing = staging.scan_written()
    staging.start()
    files = {} if step == "put" else staging.seal(listing)
    assert store.collect(Owner.current("run", 1)) == ["one"], "a restart of the run, wherever it is"
    later(monkeypatch, 2)
    with pytest.raises(CheckpointError, match="removed meanwhile"):
        if step == "put":
            staging.seal(listing)
        else:
            staging.commit(files, [], METADATA, header("one"))
    staging.abort()
    assert store.list() == []


def test_failed_deletion_is_finished_by_the_same_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "store")
    stored(store, tmp_path, "one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", _refuse)
        with pytest.raises(StorageError, match="cannot remove folder"):
            store.delete("one")
    assert store.list() == []
    assert store.collect() == ["one"]
    assert os.listdir(tmp_path / "store" / ".det_core-tmp") == []


def test_failed_abort_of_a_rank_keeps_the_chiefs_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "store")
    chief = store.begin("one", owner())
    fill(chief.path)
    files = chief.seal(chief.scan_written())
    other = store.join(chief.ticket, 1)
    fill(other.path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", _refuse)
        with pytest.raises(StorageError, match="cannot remove folder"):
            other.abort()
    assert store.collect() == []
    chief.commit(files, [], METADATA, header("one"))
    store.open("one").check(FILES)


def test_lease_left_after_commit_is_collected_alone(tmp_path: Path) -> None:
    with closing() as opened:
        plain = opened(object_store(f"memory:/{tmp_path}/store", tmp_path / "scratch"))
        store = ObjectStore(FaultyDriver(plain.driver, 1, "EIO", ("delete",)), tmp_path / "scratch")
        staging = store.begin("one", owner())
        fill(staging.path)
        staging.commit(staging.seal(staging.scan_written()), [], METADATA, header("one"))
        assert len(store._list_leases()) == 1
        assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
        assert store.collect() == []
        assert store._list_leases() == {}
        store.open("one").check(FILES)


def _refuse(*_: object) -> None:
    raise OSError(5, "Input/output error")


# Scripts that write into what is stored.


def test_stored_files_are_read_only_and_downloads_writable(home: Path, tmp_path: Path) -> None:
    with core.init(checkpoint_storage=tmp_path / "store") as ctx:
        source = tmp_path / "source"
        fill(source)
        ids = [ctx.checkpoint.upload(source, {"steps_completed": 1})]
        with ctx.checkpoint.store_path({"steps_completed": 2}) as (path, storage_id):
            fill(path)
        ids.append(storage_id)
        for number, storage_id in enumerate(ids):
            stored_files = [p for p in (tmp_path / "store" / storage_id).rglob("*") if p.is_file()]
            assert len(stored_files) == len(FILES) + 2
            assert {stat.S_IMODE(p.stat().st_mode) for p in stored_files} == {0o444}
            ctx.checkpoint.download(storage_id, tmp_path / f"out-{number}")
            assert {p.stat().st_mode & 0o200 for p in (tmp_path / f"out-{number}").rglob("*")} == {0o200}
    assert {p.stat().st_mode & 0o200 for p in source.rglob("*")} == {0o200}, "the script's own are as they were"


def test_write_into_a_restored_checkpoint_raises_at_its_end(home: Path, tmp_path: Path) -> None:
    """Permissions do not stop root."""
    with core.init(checkpoint_storage=tmp_path / "store") as ctx:
        with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
            fill(path)
        with pytest.raises(CheckpointCorrupt, match=r"model\.pt was written to.*only read from"):
            with ctx.checkpoint.restore_path(storage_id) as path:
                (path / "model.pt").chmod(0o644)
                (path / "model.pt").write_bytes(b"of the next epoch")
        with pytest.raises(ArithmeticError):  # what the script raises is not hidden
            with ctx.checkpoint.restore_path(storage_id, selector=lambda name: name == "empty") as path:
                (path / "empty").chmod(0o644)
                (path / "empty").write_bytes(b"more")
                raise ArithmeticError


@pytest.mark.parametrize("globs", [["empty"], ["**/*"]])
def test_checkpoint_deleted_during_restore_does_not_count_as_written(globs: list[str], tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    stored(store, tmp_path, "one")
    with store.open("one").check_unchanged():
        assert "empty" not in DirectoryStore(tmp_path / "store").delete("one", globs)
    with pytest.raises(CheckpointCorrupt, match="empty"):
        stored(store, tmp_path, "two")
        with store.open("two").check_unchanged():
            (tmp_path / "store" / "two" / "empty").unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_user_cannot_write_into_a_restored_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    (tmp_path / "store").mkdir()
    os.chown(tmp_path / "store", 65534, 65534)
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            store = DirectoryStore(tmp_path / "store")
            staging = store.begin("one", owner())
            (staging.path / "model.pt").write_bytes(b"model")
            staging.commit(staging.seal(staging.scan_written()), [], METADATA, header("one"))
            with pytest.raises(PermissionError):
                (tmp_path / "store" / "one" / "model.pt").write_bytes(b"of the next epoch")
            store.open("one").check(["model.pt"])
            store.delete("one")
            os._exit(0 if store.list() == [] else 1)
        except BaseException as e:
            print(repr(e), file=sys.stderr)
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# Stores that are not there.


@pytest.mark.parametrize("resume", [None, "latest"])
def test_init_with_missing_bucket_raises(home: Path, moto_server: S3Server, tmp_path: Path, resume: str | None) -> None:
    storage = moto_server.storage("no-such-bucket", "prefix")
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/prefix.*make the bucket, or correct its name"):
        core.init(checkpoint_storage=storage, resume=resume)
    with closing() as opened:
        store = opened(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
        for call in (store.list, lambda: store.open("one"), store.in_use, lambda: store.begin("one", owner()).start()):
            with pytest.raises(StorageError, match="no-such-bucket"):
                call()


def test_init_with_empty_bucket_succeeds(home: Path, moto_server: S3Server) -> None:
    for prefix in ("", "prefix"):
        with core.init(checkpoint_storage=moto_server.storage(moto_server.make_bucket(), prefix)) as ctx:
            assert ctx.latest_checkpoint is None


def test_init_with_missing_driver_raises(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[s3\]"):
        core.init(checkpoint_storage="s3://bucket/prefix")
