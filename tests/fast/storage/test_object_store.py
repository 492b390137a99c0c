"""Objects that an object store keeps, lists and leaves alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from det_core.storage import Disk, Header, Owner, Store, scan
from det_core.storage._drivers import Driver
from det_core.storage._object_store import ObjectStore
from support.buckets import Around, FaultyDriver, closing, contents, keys, object_store, put, through
from support.checkpoints import FILES, fill, tree

METADATA = {"steps_completed": 3}
DEAD = {"pid": 2**22 + 1, "started": 5}


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    with closing() as take:
        yield take


@pytest.fixture
def store(opened: Callable[[Any], Any], tmp_path: Path) -> ObjectStore:
    found: ObjectStore = opened(object_store(f"memory:/{tmp_path}/store", tmp_path / "scratch"))
    return found


def owner(restart: int = 0, **changes: Any) -> Owner:
    return Owner(**{**vars(Owner.current("run", restart)), **changes})


def header(storage_id: str, ordinal: int = 1) -> Header:
    return Header("run", 0, ordinal, "2026-11-21T12:00:00.000000+00:00", 3, storage_id)


def stored(store: Store, storage_id: str, folder: Path, files: dict[str, bytes] = FILES) -> None:
    fill(folder, files)
    staging = store.begin(storage_id, owner())
    listing = scan(store.disk, str(folder))
    staging.commit(staging.put(listing), listing.directories, METADATA, header(storage_id))


def test_checkpoint_has_one_object_per_file(store: ObjectStore, tmp_path: Path) -> None:
    stored(store, "one", tmp_path / "source")
    assert keys(store) == {f"one/{path}" for path in (*FILES, "metadata.json", ".det_core/manifest.json")}
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]


def test_unused_object_store_makes_no_request(tmp_path: Path, opened: Callable[[Any], Any]) -> None:
    store = opened(object_store(f"local://{tmp_path}/store", tmp_path / "scratch"))
    assert store.list() == [] and store.collect() == [] and store.in_use() == set()
    store.check_reachable()
    assert not (tmp_path / "store").exists() and not (tmp_path / "scratch").exists()


def test_foreign_checkpoint_is_read_unverified(store: ObjectStore, tmp_path: Path) -> None:
    for key, data in {"model.pt": b"model", "sub/a": b"a", "metadata.json": b'{"steps_completed": 9}'}.items():
        put(store, f"theirs/{key}", data)
    assert store.list() == []
    found = store.open("theirs")
    assert not found.manifest.verified
    assert found.metadata() == {"steps_completed": 9}
    assert found.manifest.resources == {"metadata.json": 22, "model.pt": 5, "sub/": 0, "sub/a": 1}
    found.check(found.manifest.files)
    found.copy_to(tmp_path / "out", ["model.pt", "sub/a"], ["sub/"])
    assert tree(tmp_path / "out") == {"model.pt": b"model", "sub/a": b"a"}


def test_foreign_checkpoint_is_only_removed_by_delete(store: ObjectStore) -> None:
    put(store, "theirs/model.pt")
    put(store, "tensorboard/run/events")
    before = contents(store)
    with pytest.raises(StorageError, match=r"theirs: a checkpoint of that ID exists"):
        store.begin("theirs", owner()).start()
    assert store.collect(owner(restart=7)) == []
    assert contents(store) == before
    assert store.delete("theirs") == {}
    assert keys(store) == {"tensorboard/run/events"}


def test_object_with_invalid_path_is_reported(store: ObjectStore) -> None:
    put(store, "theirs/a//b")
    with pytest.raises(CheckpointCorrupt, match="'a//b' is not a path"):
        store.open("theirs")


def test_delete_removes_parts_of_a_foreign_checkpoint(store: ObjectStore) -> None:
    put(store, "theirs/model.pt")
    put(store, "theirs/sub/log.txt", b"log")
    assert store.delete("theirs", ["**/*.txt"]) == {"model.pt": 1}
    assert keys(store) == {"theirs/model.pt"}
    assert store.delete("nothing", ["**/*.txt"]) == {}


# Two at a time.


@pytest.mark.parametrize("change", [None, b"other size"])
def test_commit_with_a_missing_file_is_rejected(store: ObjectStore, change: bytes | None) -> None:
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    files = staging.seal(staging.scan_written())
    if change is None:
        store.driver.remove(["one/file"])
    else:
        put(store, "one/file", change)
    with pytest.raises(StorageError, match=r"cannot commit one: file .*though it was stored"):
        staging.commit(files, [], METADATA, header("one"))
    staging.abort()
    assert contents(store) == {}


def test_collect_keeps_checkpoints_of_live_writers(store: ObjectStore) -> None:
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    files = staging.seal(staging.scan_written())
    elsewhere = store.begin("two", owner(host="0" * 12))
    elsewhere.start()
    for collector in (None, owner(), Owner.current("another run", 5)):
        assert store.collect(collector) == []
    staging.commit(files, [], METADATA, header("one"))
    store.open("one").check(["file"])
    assert store.collect(owner(restart=1)) == ["two"]
    elsewhere.abort()


def test_collect_keeps_a_committed_checkpoint_and_removes_its_lease(store: ObjectStore, tmp_path: Path) -> None:
    stored(store, "one", tmp_path / "source")
    put(store, f".det_core-tmp/one.{owner(**DEAD).tag}")
    assert store.collect() == []
    assert not keys(store, ".det_core-tmp")
    store.open("one").check(FILES)


def test_torn_manifest_of_a_dead_writer_is_collected(store: ObjectStore) -> None:
    put(store, f".det_core-tmp/one.{owner(**DEAD).tag}")
    put(store, "one/file")
    put(store, "one/.det_core/manifest.json", b'{"version": 1, "sto')
    assert store.collect() == ["one"]
    assert contents(store) == {}


def test_unfinished_checkpoint_is_not_found(store: ObjectStore) -> None:
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    staging.seal(staging.scan_written())
    with pytest.raises(CheckpointNotFound):
        store.open("one")
    assert store.delete("one") == {}
    assert "one/file" in keys(store)
    staging.abort()


def test_late_object_of_a_rank_is_collected(store: ObjectStore, tmp_path: Path) -> None:
    """A rank that still puts when the chief has given up leaves what a later restart, or the chief, finds."""
    chief = store.join(store.begin("one", owner()).ticket, 0)
    chief.start()
    rank = object_store(store.root, tmp_path / "other").join(chief.ticket, 1)
    (rank.path / "file").write_text("late")
    listing = rank.scan_written()
    rank.start()
    chief.abort()
    rank.seal(listing)
    rank.abort()
    assert "one/file" in keys(store)
    assert object_store(store.root, tmp_path / "third").collect() == [], "the mark is of one who lives"
    assert store.collect() == ["one"]
    assert contents(store) == {}
    assert not any(path.is_file() for path in tmp_path.rglob("other/**/*"))


def test_abort_of_a_rank_after_commit_keeps_the_checkpoint(store: ObjectStore) -> None:
    chief = store.join(store.begin("one", owner(**DEAD)).ticket, 0)
    rank = store.join(chief.ticket, 1)
    files = {}
    for name, staging in (("a", chief), ("b", rank)):
        (staging.path / name).write_text(name)
        files |= staging.seal(staging.scan_written())
    chief.commit(files, [], METADATA, header("one"))
    rank.abort()
    chief.abort()
    store.open("one").check(["a", "b"])
    assert keys(store) == {"one/a", "one/b", "one/metadata.json", "one/.det_core/manifest.json"}


# Deletion.


def half_deleted(store: ObjectStore, tmp_path: Path, mark: str) -> None:
    stored(store, "one", tmp_path / "source")
    put(store, f".det_core-tmp/{mark}")
    for path in (".det_core/manifest.json", "rng"):
        store.driver.remove([f"one/{path}"])


def test_collect_finishes_the_deletion_of_a_dead_process(store: ObjectStore, tmp_path: Path) -> None:
    half_deleted(store, tmp_path, f"one.{owner(**DEAD).tag}")
    assert store.list() == []
    with pytest.raises(CheckpointNotFound):
        store.open("one")
    assert store.collect() == ["one"]
    assert contents(store) == {}


def test_collect_leaves_a_deletion_to_its_live_process(store: ObjectStore, tmp_path: Path) -> None:
    half_deleted(store, tmp_path, f"one.{owner(host='0' * 12).tag}")
    before = contents(store)
    assert store.collect() == []
    assert store.delete("one") == {}
    assert contents(store) == before


def test_checkpoint_in_deletion_is_not_listed_from_cache(store: ObjectStore, tmp_path: Path) -> None:
    half = tmp_path / "half"
    stored(store, "one", half)
    assert [found.storage_id for found in store.list()] == ["one"]
    put(store, f".det_core-tmp/one.{owner(host='0' * 12).tag}")
    store.driver.remove(["one/.det_core/manifest.json"])
    assert store.list() == []


def test_delete_of_a_name_like_a_glob_removes_no_other_file(store: ObjectStore, tmp_path: Path) -> None:
    stored(store, "one", tmp_path / "source", {"*": b"star", "a[b]?": b"brackets", "ab": b"ab", "b": b"b"})
    assert set(store.delete("one", ["[*]", "a[b]?"])) == {"*", "ab", "b", "metadata.json"}
    store.open("one").check(["*", "ab", "b"])


# Names.

NAMES = st.text(
    st.one_of(
        st.sampled_from(" .%#?+&=*[]{}~:;,'\"\\|<>@$^`!()é中\u200b\U0001f600"),
        st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/"),
    ),
    min_size=1,
    max_size=20,
).filter(lambda name: name not in (".", "..") and len(name.encode()) <= 200)


@pytest.mark.parametrize("scheme", ["memory:/", "local://"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(NAMES, min_size=1, max_size=4, unique_by=str.casefold), data=st.binary(max_size=30))
def test_file_with_any_name_is_read_back(scheme: str, names: list[str], data: bytes, tmp_path: Path) -> None:
    place = tmp_path / os.urandom(4).hex()
    files = {name: data + name.encode() for name in names} | {f"in/{name}/file": b"inner" for name in names}
    files = {name: value for name, value in files.items() if name not in ("in", "metadata.json", ".det_core")}
    with closing() as take:
        store = take(object_store(f"{scheme}{place}/store", place / "scratch"))
        stored(store, "one", place / "source", files)
        store.open("one").copy_to(place / "out", files, [])
        assert tree(place / "out") == files
        store.open("one").check(files)
        assert set(store.delete("one", ["in/**"])) >= {name for name in files if not name.startswith("in/")}
        assert store.delete("one") == {}
        assert contents(store) == {}


# Being stopped.


def test_progress_that_raises_stops_an_upload(opened: Callable[[Any], Any], tmp_path: Path) -> None:
    store = opened(object_store(f"local://{tmp_path}/store", tmp_path / "scratch"))
    source = fill(tmp_path / "source", {f"file{i}": b"x" * 300_000 for i in range(200)})

    def progress(done: int) -> None:
        if done:
            raise InterruptedError("enough")

    staging = store.begin("one", owner())
    with pytest.raises(InterruptedError, match="enough"):
        staging.put(scan(store.disk, str(source)), progress)
    assert 0 < len(keys(store, "one/")) < 200
    staging.abort()
    assert keys(store, "one/") == set()


class Stuck(Around):
    """Interrupts the main thread, and does not come back until it is let go."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.threads, self.free = 2, threading.Event()

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        if key == "one/file":
            threading.Timer(0.5, self.free.set).start()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.free.wait()
        return call(*args)


def test_interrupt_stops_an_upload(store: ObjectStore) -> None:
    stuck = through(store, Stuck)
    staging = stuck.begin("one", owner())
    (staging.path / "file").write_text("x")
    listing = staging.scan_written()
    with pytest.raises(KeyboardInterrupt):
        staging.seal(listing)
    staging.abort()
    assert stuck.collect() == ["one"], "a request that was given up may be carried out late"
    assert contents(store) == {}


# What goes wrong.


class Healing(Around):
    """Flips a bit of the first answer for each object."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.seen: set[str] = set()

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        found = call(*args)
        if operation == "read" and key not in self.seen and ".det_core" not in key and found:
            self.seen.add(key)
            return bytes([found[0] ^ 1]) + found[1:]
        return found


def test_chunk_damaged_in_transit_is_fetched_again(store: ObjectStore, tmp_path: Path) -> None:
    files = {**FILES, "large": os.urandom(1000) * 20_000}
    stored(store, "one", tmp_path / "source", files)
    healing = through(store, Healing)
    healing.open("one").copy_to(tmp_path / "out", files, [])
    assert tree(tmp_path / "out") == files
    assert isinstance(healing.driver, Healing) and len(healing.driver.seen) == 4


def test_file_changed_during_upload_is_reported(store: ObjectStore, tmp_path: Path) -> None:
    """It is hashed, and then sent: the digests would be of other bytes."""

    class Changing(Around):
        def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
            if operation == "write" and key == "one/file":
                os.utime(args[0], ns=(5, 5))
            return call(*args)

    staging = through(store, Changing).begin("one", owner())
    (staging.path / "file").write_text("x")
    with pytest.raises(Exception, match="file was changed while it was read"):
        staging.seal(staging.scan_written())
    staging.abort()


def test_download_that_does_not_fit_is_rejected_before_fetching(store: ObjectStore, tmp_path: Path) -> None:
    class Full(Disk):
        def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
            found = super().do(operation, path, function, *args)
            return os.statvfs_result((4096, 4096, 1000, 10, 10, *found[5:])) if function is os.statvfs else found

    stored(store, "one", tmp_path / "source", {"large": b"x" * 300_000})
    found = ObjectStore(store.driver, tmp_path / "scratch", disk=Full("the disk")).open("one")
    with pytest.raises(
        StorageError, match=r"the disk: cannot write 300000 bytes into .*/out: there are 40960 bytes left"
    ):
        found.copy_to(tmp_path / "out", ["large"], [])
    assert tree(tmp_path / "out") == {}


def test_put_file_stays_below_the_root(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for name in ("../x", "/x", ".det_core-tmp/x", "", "a//b"):
        with pytest.raises(ValueError, match="not a path below"):
            store.put_file(tmp_path / "file", name)
    assert contents(store) == {}


def test_read_lease_that_cannot_be_put_stops_no_reader(store: ObjectStore, tmp_path: Path) -> None:
    stored(store, "one", tmp_path / "source")
    for at in (1, 2):
        driver = FaultyDriver(store.driver, at, "EACCES")
        with ObjectStore(driver, tmp_path).read_lease("one", owner()):
            store.open("one").check(FILES)
        assert driver.struck


def test_failed_abort_is_collected_by_the_same_process(store: ObjectStore, tmp_path: Path) -> None:
    driver = FaultyDriver(store.driver)
    failing = ObjectStore(driver, tmp_path / "scratch")
    staging = failing.begin("one", owner())
    (staging.path / "file").write_text("ours")
    staging.seal(staging.scan_written())
    driver.at, driver.how = driver.calls + 1, "EIO"
    with pytest.raises(StorageError, match="cannot delete"):
        staging.abort()
    assert store.collect() == [], "nobody else knows"
    assert failing.collect() == ["one"]
    assert contents(store) == {}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_check_writable_of_unusable_object_store_raises(store: ObjectStore, tmp_path: Path, at: int) -> None:
    driver = FaultyDriver(store.driver, at, "EACCES")
    with pytest.raises(StorageError, match=f"{store.root}: cannot .*Permission denied") as caught:
        ObjectStore(driver, tmp_path).check_writable()
    assert driver.struck in str(caught.value)
    assert len(contents(store)) == (driver.struck == "delete")


def test_check_writable_with_late_objects_raises(store: ObjectStore, tmp_path: Path) -> None:
    class Late(Around):
        def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
            return {} if operation == "list" else call(*args)

    with pytest.raises(StorageError, match=r"cannot read back .*is not there"):
        through(store, Late).check_writable()


def test_store_closed_twice_can_be_used_again(store: ObjectStore) -> None:
    store.close()
    store.close()
    assert store.list() == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_store_in_a_forked_process_raises_instead_of_blocking(moto_server: Any, tmp_path: Path) -> None:
    from det_core.storage import open_store

    with closing() as take:
        store = take(open_store(moto_server.storage(moto_server.make_bucket()), tmp_path, scratch=tmp_path))
        assert store.list() == []
        if (pid := os.fork()) == 0:
            signal.alarm(60)
            try:
                store.list()
            except StorageError:
                os._exit(1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert store.list() == []
