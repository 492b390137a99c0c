"""What an object store keeps, shows and leaves alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from det_core.storage import Disk, Header, Owner, Store, scan
from det_core.storage._objects import Bucket, Door, ObjectStore
from support import TESTS
from support.buckets import closing, contents, in_bucket, object_store
from support.checkpoints import FILES, fill, tree
from support.faulty_doors import FaultyDoor

METADATA = {"steps_completed": 3}


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


DEAD = {"pid": 2**22 + 1, "started": 5}


def header(storage_id: str, ordinal: int = 1) -> Header:
    return Header("run", 0, ordinal, "2026-11-21T12:00:00.000000+00:00", 3, storage_id)


def stored(store: Store, storage_id: str, folder: Path, files: dict[str, bytes] = FILES) -> None:
    fill(folder, files)
    staging = store.begin(storage_id, owner())
    listing = scan(store.disk, str(folder))
    staging.commit(staging.put(listing), listing.directories, METADATA, header(storage_id))


def put(store: ObjectStore, key: str, data: bytes = b"x") -> None:
    in_bucket(store, lambda bucket: bucket.put(key, data))


def test_the_layout_is_one_object_a_file(store: ObjectStore, tmp_path: Path) -> None:
    stored(store, "one", tmp_path / "source")
    keys = {f"one/{path}" for path in FILES} | {"one/metadata.json", "one/.det_core/manifest.json"}
    assert set(contents(store)) == keys
    assert not any(path.is_file() for path in (tmp_path / "scratch").rglob("*"))


def test_a_store_is_not_touched_before_it_is_used(tmp_path: Path, opened: Callable[[Any], Any]) -> None:
    opened(object_store(f"local://{tmp_path}/store", tmp_path / "scratch"))
    assert list(tmp_path.iterdir()) == [tmp_path / "home"] or list(tmp_path.iterdir()) == []


# What others wrote.


def test_a_foreign_checkpoint_is_read_unverified(
    store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for key, data in {"model.pt": b"model", "sub/a": b"a", "metadata.json": b'{"steps_completed": 9}'}.items():
        put(store, f"theirs/{key}", data)
    assert store.list() == []
    found = store.open("theirs")
    assert "unverified" in caplog.text
    assert not found.manifest.verified
    assert found.metadata() == {"steps_completed": 9}
    assert found.manifest.resources == {"metadata.json": 22, "model.pt": 5, "sub/": 0, "sub/a": 1}
    found.check(found.manifest.files)
    found.copy_out(tmp_path / "out", ["model.pt", "sub/a"], ["sub/"])
    assert tree(tmp_path / "out") == {"model.pt": b"model", "sub/a": b"a"}


def test_what_is_foreign_is_left_alone_unless_it_is_deleted(store: ObjectStore) -> None:
    put(store, "theirs/model.pt")
    put(store, "tensorboard/run/events")
    before = contents(store)
    staging = store.begin("theirs", owner())
    (staging.path / "file").write_text("ours")
    with pytest.raises(StorageError, match=r"theirs: a checkpoint of that id is there"):
        staging.take(staging.written())
    staging.abort()
    assert store.collect(owner(restart=7)) == []
    assert contents(store) == before
    assert store.delete("theirs") == {}
    assert set(contents(store)) == {"tensorboard/run/events"}


def test_a_name_that_no_machine_can_have_is_told(store: ObjectStore) -> None:
    put(store, "theirs/a//b")
    with pytest.raises(CheckpointCorrupt, match="'a//b' is no path"):
        store.open("theirs")


def test_parts_of_a_foreign_checkpoint_are_deleted(store: ObjectStore) -> None:
    put(store, "theirs/model.pt")
    put(store, "theirs/sub/log.txt", b"log")
    assert store.delete("theirs", ["**/*.txt"]) == {"model.pt": 1}
    assert set(contents(store)) == {"theirs/model.pt"}
    assert store.delete("nothing", ["**/*.txt"]) == {}


# Two at a time.


def test_two_writers_of_one_id_do_not_mix(store: ObjectStore) -> None:
    first = store.begin("one", owner())
    with pytest.raises(StorageError, match="cannot begin one: another process is writing it"):
        store.begin("one", owner(pid=os.getppid(), host="0" * 12))
    with pytest.raises(StorageError, match="or this one is already"):
        store.begin("one", owner())
    first.abort()
    assert contents(store) == {}


def test_a_commit_refuses_where_a_manifest_is(store: ObjectStore) -> None:
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    listing = staging.written()
    files = staging.take(listing)
    put(store, "one/.det_core/manifest.json", b"{}")
    with pytest.raises(StorageError, match="a checkpoint of that id is there"):
        staging.commit(files, [], METADATA, header("one"))


@pytest.mark.parametrize("change", [None, b"other size"])
def test_a_commit_refuses_where_a_file_is_gone(store: ObjectStore, change: bytes | None) -> None:
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    files = staging.take(staging.written())
    if change is None:
        in_bucket(store, lambda bucket: bucket.delete(["one/file"]))
    else:
        put(store, "one/file", change)
    with pytest.raises(StorageError, match=r"cannot commit one: file .*though it was stored"):
        staging.commit(files, [], METADATA, header("one"))
    staging.abort()
    assert contents(store) == {}


def test_the_living_are_left_alone_by_who_collects(store: ObjectStore, tmp_path: Path) -> None:
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    files = staging.take(staging.written())
    elsewhere = store.begin("two", owner(host="0" * 12))
    for collector in (None, owner(), Owner.current("another run", 5)):
        assert store.collect(collector) == []
    staging.commit(files, [], METADATA, header("one"))
    store.open("one").check(["file"])
    assert store.collect(owner(restart=1)) == ["two"]
    elsewhere.abort()


def test_a_mark_beside_a_manifest_goes_and_the_checkpoint_stays(store: ObjectStore, tmp_path: Path) -> None:
    stored(store, "one", tmp_path / "source")
    put(store, f".det_core-tmp/one.{owner(**DEAD).tag}")
    assert store.collect() == []
    assert not [key for key in contents(store) if key.startswith(".det_core-tmp/")]
    store.open("one").check(FILES)


def test_a_torn_manifest_of_a_dead_writer_is_no_commit(store: ObjectStore) -> None:
    put(store, f".det_core-tmp/one.{owner(**DEAD).tag}")
    put(store, "one/file")
    put(store, "one/.det_core/manifest.json", b'{"version": 1, "sto')
    assert store.collect() == ["one"]
    assert contents(store) == {}


def test_what_is_being_written_is_not_there(store: ObjectStore) -> None:
    staging = store.begin("one", owner())
    (staging.path / "file").write_text("ours")
    staging.take(staging.written())
    with pytest.raises(CheckpointNotFound):
        store.open("one")
    assert store.delete("one") == {}
    assert "one/file" in contents(store)
    staging.abort()


def test_ranks_that_write_together_have_marks_of_their_own(store: ObjectStore, tmp_path: Path) -> None:
    """A rank that still puts when the chief has given up leaves what a later restart finds."""
    chief = store.begin("one", owner(**DEAD))
    rank = object_store(store.root, tmp_path / "other").join(chief.ticket, 1)
    (rank.path / "file").write_text("late")
    listing = rank.written()
    chief.abort()
    rank.take(listing)
    rank.abort()
    assert "one/file" in contents(store)
    assert store.collect() == []
    assert store.collect(owner(restart=1)) == ["one"]
    assert contents(store) == {}
    assert not any(path.is_file() for path in tmp_path.rglob("other/**/*"))


def test_a_rank_leaves_a_committed_checkpoint_as_it_is(store: ObjectStore, tmp_path: Path) -> None:
    chief = store.join(store.begin("one", owner(**DEAD)).ticket, 0)
    rank = store.join(chief.ticket, 1)
    files = {}
    for name, staging in (("a", chief), ("b", rank)):
        (staging.path / name).write_text(name)
        files |= staging.take(staging.written())
    chief.commit(files, [], METADATA, header("one"))
    rank.abort()
    chief.abort()
    store.open("one").check(["a", "b"])
    assert set(contents(store)) == {"one/a", "one/b", "one/metadata.json", "one/.det_core/manifest.json"}


# Deletion.


def half_deleted(store: ObjectStore, tmp_path: Path, who: Owner) -> None:
    stored(store, "one", tmp_path / "source")
    put(store, ".det_core-tmp/deleted.one", b'{"owner": "%s"}' % who.tag.encode())
    in_bucket(store, lambda bucket: bucket.delete(["one/.det_core/manifest.json", "one/rng"]))


def test_what_a_dead_process_began_to_delete_is_deleted(store: ObjectStore, tmp_path: Path) -> None:
    half_deleted(store, tmp_path, owner(**DEAD))
    assert store.list() == []
    with pytest.raises(CheckpointNotFound):
        store.open("one")
    assert store.collect() == []
    assert contents(store) == {}


def test_what_a_living_process_deletes_is_left_to_it(store: ObjectStore, tmp_path: Path) -> None:
    half_deleted(store, tmp_path, owner(host="0" * 12))
    before = contents(store)
    assert store.collect() == []
    assert contents(store) == before
    with pytest.raises(StorageError, match="cannot begin one: it is being deleted"):
        fail_to_begin(store)
    assert store.delete("one") == {}
    assert contents(store) == {}


def fail_to_begin(store: ObjectStore) -> None:
    """The name is taken by what is left, so first that has to go."""
    in_bucket(store, lambda bucket: bucket.delete([f"one/{path}" for path in (*FILES, "metadata.json")]))
    store.begin("one", owner())


def test_an_id_can_be_used_again_after_half_a_delete(store: ObjectStore, tmp_path: Path) -> None:
    half_deleted(store, tmp_path, owner(**DEAD))
    staging = store.begin("one", owner())
    (staging.path / "new").write_text("new")
    staging.commit(staging.take(staging.written()), [], METADATA, header("one"))
    assert set(store.open("one").manifest.files) == {"new", "metadata.json"}
    assert not [key for key in contents(store) if key.startswith(".det_core-tmp/") or key.endswith("rng")]


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
def test_any_name_comes_back(scheme: str, names: list[str], data: bytes, tmp_path: Path) -> None:
    place = tmp_path / os.urandom(4).hex()
    files = {name: data + name.encode() for name in names} | {f"in/{name}/file": b"inner" for name in names}
    files = {name: value for name, value in files.items() if name not in ("in", "metadata.json", ".det_core")}
    with closing() as take:
        store = take(object_store(f"{scheme}{place}/store", place / "scratch"))
        stored(store, "one", place / "source", files)
        store.open("one").copy_out(place / "out", files, [])
        assert tree(place / "out") == files
        store.open("one").check(files)
        assert set(store.delete("one", ["in/**"])) >= {name for name in files if not name.startswith("in/")}
        assert store.delete("one") == {}
        assert contents(store) == {}


# Bounds, waiting, and being stopped.


class Counting(Door):
    """Counts the bytes that are on their way, and waits a moment with each."""

    now = most = 0

    async def attempt(self, operation: str, key: str, function: Any, *args: Any) -> Any:
        import asyncio

        size = sum(len(arg) for arg in args if isinstance(arg, bytes))
        if operation == "read" and args[2] is not None:
            size = args[2] - args[1]
        self.now += size
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.02)
            return await super().attempt(operation, key, function, *args)
        finally:
            self.now -= size


def test_the_bytes_in_flight_are_bounded(tmp_path: Path, opened: Callable[[Any], Any]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(3):
        with (source / f"large{i}").open("wb") as file:
            file.truncate((100 << 20) + i)
    plain = opened(object_store(f"local://{tmp_path}/store", tmp_path / "scratch"))
    door = Counting(plain.door.bucket)
    store = ObjectStore(door, tmp_path / "scratch")
    staging = store.begin("one", owner())
    listing = scan(store.disk, str(source))
    files = staging.put(listing)
    assert 32 << 20 < door.most <= 128_000_000
    staging.commit(files, [], METADATA, header("one"))
    door.most = 0
    store.open("one").check([*listing.files])
    assert 32 << 20 < door.most <= 128_000_000


def test_retry_after_is_waited_for(store: ObjectStore, tmp_path: Path) -> None:
    door = FaultyDoor(store.door.bucket, 1, "503")
    began = time.monotonic()
    assert ObjectStore(door, tmp_path).list() == []
    assert time.monotonic() - began >= 0.05
    assert door.calls == 2


class Unlucky(Door):
    """Reaches nobody, and keeps how long it waited between tries."""

    def __init__(self, bucket: Bucket, patience: float) -> None:
        super().__init__(bucket, patience=patience)
        self.pauses: list[float] = []

    async def attempt(self, *args: Any) -> Any:
        raise ConnectionRefusedError(111, "Connection refused")

    def _pause(self, number: int, error: Exception, left: float) -> float:
        self.pauses.append(super()._pause(number, error, left))
        return self.pauses[-1]


def test_the_last_try_is_when_patience_ends(store: ObjectStore, tmp_path: Path) -> None:
    door = Unlucky(store.door.bucket, 0.5)
    with pytest.raises(StorageError, match="Connection refused"):
        ObjectStore(door, tmp_path).list()
    assert len(door.pauses) >= 2 and sum(door.pauses) <= 0.5


def test_what_does_not_answer_is_told_in_time(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from det_core.storage._objects import _door

    async def never(self: Any, prefix: str) -> list[str]:
        import asyncio

        await asyncio.sleep(3600)
        return []

    monkeypatch.setattr(_door, "DEADLINE", 0.1)
    monkeypatch.setattr(_door, "LIST_DEADLINE", 0.1)
    monkeypatch.setattr(type(store.door.bucket), "children", never)
    with pytest.raises(StorageError, match=r"cannot list /: .*no answer within"):
        ObjectStore(Door(store.door.bucket, patience=0.3), store.scratch).list()


def test_progress_stops_an_upload_between_pieces(opened: Callable[[Any], Any], tmp_path: Path) -> None:
    plain = opened(object_store(f"local://{tmp_path}/store", tmp_path / "scratch"))
    store = ObjectStore(Counting(plain.door.bucket), tmp_path / "scratch")
    source = fill(tmp_path / "source", {f"file{i}": b"x" * 300_000 for i in range(200)})

    def progress(done: int) -> None:
        if done:
            raise InterruptedError("enough")

    staging = store.begin("one", owner())
    with pytest.raises(InterruptedError, match="enough"):
        staging.put(scan(store.disk, str(source)), progress)
    assert 0 < len(contents(plain, "one/")) < 200
    staging.abort()
    assert contents(plain) == {}


def test_an_interrupt_ends_the_wait(store: ObjectStore, tmp_path: Path) -> None:
    class Slow(Door):
        async def attempt(self, operation: str, key: str, function: Any, *args: Any) -> Any:
            import asyncio

            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.sleep(600)

    began = time.monotonic()
    main = threading.main_thread().ident
    assert main is not None
    with pytest.raises(KeyboardInterrupt):
        ObjectStore(Slow(store.door.bucket), tmp_path).list()
    assert time.monotonic() - began < 100


def in_a_fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as e:
            os._exit(1 if isinstance(e, StorageError) and "forked" in str(e) else 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_told_instead_of_hanging(store: ObjectStore, tmp_path: Path) -> None:
    store.list()
    assert in_a_fork(lambda: store.list() and None) == 1
    fresh = object_store(f"memory:/{tmp_path}/fresh", tmp_path / "scratch")
    assert in_a_fork(lambda: fresh.list() and None) == 0, "one that was not used yet may be used there"
    assert store.list() == []


def test_a_loop_that_has_ended_is_told_instead_of_waited_for(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from fsspec import asyn
from support.buckets import object_store
store = object_store("memory://x", Path({str(tmp_path)!r}))
store.list()
asyn.get_loop().call_soon_threadsafe(asyn.get_loop().stop)
asyn.iothread[0].join()
try:
    store.list()
except OSError as e:
    print(e)
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "event loop has ended" in done.stdout, done


class Healing(Door):
    """Flips a bit of the first answer for each object."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.seen: set[str] = set()

    async def attempt(self, operation: str, key: str, function: Any, *args: Any) -> Any:
        found = await super().attempt(operation, key, function, *args)
        if operation == "read" and key not in self.seen and not key.startswith("one/.det_core") and found:
            self.seen.add(key)
            return bytes([found[0] ^ 1]) + found[1:]
        return found


def test_bytes_that_the_network_changed_are_fetched_again(store: ObjectStore, tmp_path: Path) -> None:
    files = {**FILES, "large": os.urandom(1000) * 20_000}
    stored(store, "one", tmp_path / "source", files)
    door = Healing(store.door.bucket)
    found = ObjectStore(door, tmp_path / "scratch").open("one")
    found.copy_out(tmp_path / "out", files, [])
    assert tree(tmp_path / "out") == files
    assert len(door.seen) == 4


def test_what_does_not_fit_is_told_before_it_is_fetched(store: ObjectStore, tmp_path: Path) -> None:
    class Full(Disk):
        def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
            found = super().do(operation, path, function, *args)
            return os.statvfs_result((4096, 4096, 1000, 10, 10, *found[5:])) if function is os.statvfs else found

    stored(store, "one", tmp_path / "source", {"large": b"x" * 300_000})
    found = ObjectStore(store.door, tmp_path / "scratch", disk=Full("the disk")).open("one")
    with pytest.raises(
        StorageError, match=r"the disk: cannot write 300000 bytes into .*/out: there are 40960 bytes left"
    ):
        found.copy_out(tmp_path / "out", ["large"], [])
    assert tree(tmp_path / "out") == {}


def test_files_are_put_beside_and_nowhere_else(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for name in ("../x", "/x", ".det_core-tmp/x", "", "a//b"):
        with pytest.raises(ValueError, match="no path below"):
            store.put_beside(tmp_path / "file", name)
    assert contents(store) == {}


def test_marks_that_cannot_be_put_stop_no_reader(store: ObjectStore, tmp_path: Path) -> None:
    stored(store, "one", tmp_path / "source")
    for at in (1, 2):
        door = FaultyDoor(store.door.bucket, at, "EACCES")
        with ObjectStore(door, tmp_path).hold("one", owner()):
            store.open("one").check(FILES)
        assert door.struck


def test_what_could_not_be_aborted_is_collected_by_the_same_process(store: ObjectStore, tmp_path: Path) -> None:
    door = FaultyDoor(store.door.bucket)
    failing = ObjectStore(door, tmp_path / "scratch")
    staging = failing.begin("one", owner())
    (staging.path / "file").write_text("ours")
    staging.take(staging.written())
    door.at, door.how = door.calls + 1, "EIO"
    with pytest.raises(StorageError, match="cannot delete"):
        staging.abort()
    assert store.collect() == [], "nobody else knows"
    assert failing.collect() == ["one"]
    assert contents(store) == {}


class Late(Door):
    """Answers no request to write the object ``one/late`` before it is cancelled; refuses ``one/refused`` then."""

    async def attempt(self, operation: str, key: str, function: Any, *args: Any) -> Any:
        import asyncio

        if (operation, key) == ("write", "one/late"):
            self.asked = asyncio.get_running_loop().create_future()
            await self.asked
        if (operation, key) == ("write", "one/refused"):
            while not hasattr(self, "asked"):
                await asyncio.sleep(0.001)
            raise PermissionError("on purpose")
        return await super().attempt(operation, key, function, *args)


@pytest.mark.parametrize("who", ["the same process", "a later restart"])
def test_what_is_done_after_it_was_given_up_is_collected(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A server may carry a request out that nobody waits for any more, after all that was put has been removed."""
    monkeypatch.setattr(store.door.bucket, "concludes", False)
    late = ObjectStore(Late(store.door.bucket), tmp_path / "scratch")
    source = fill(tmp_path / "source", {"late": b"l" * (5 << 20), "refused": b"r" * (5 << 20)})
    staging = late.begin("one", owner())
    with pytest.raises(StorageError, match="cannot write one/refused"):
        staging.put(scan(store.disk, str(source)))
    staging.abort()
    put(store, "one/late")
    assert store.collect() == [] and "one/late" in contents(store), "the mark is of one who lives"
    assert (late.collect() if who == "the same process" else store.collect(owner(1))) == ["one"]
    assert contents(store) == {}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_store_that_cannot_be_used_is_told_by_validate(store: ObjectStore, tmp_path: Path, at: int) -> None:
    door = FaultyDoor(store.door.bucket, at, "EACCES")
    with pytest.raises(StorageError, match=f"{store.root}: cannot .*Permission denied") as caught:
        ObjectStore(door, tmp_path).validate()
    assert door.struck in str(caught.value)
    assert len(contents(store)) == (door.struck == "delete")


def test_what_is_written_must_be_there_at_once(store: ObjectStore, tmp_path: Path) -> None:
    class Late(Door):
        async def list(self, prefix: str) -> list[Any]:
            return []

    with pytest.raises(StorageError, match=r"cannot read back .*shows new objects late"):
        ObjectStore(Late(store.door.bucket), tmp_path).validate()


def test_a_store_is_closed_twice_and_used_again(store: ObjectStore) -> None:
    store.close()
    store.close()
    assert store.list() == []
