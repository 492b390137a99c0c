"""Contract of every checkpoint store, as tests to inherit.

::

    class TestMyStore(CheckpointStoreSuite):
        def make_store(self, folder): return MyStore(...)
        def damage(self, store, storage_id, path, change): ...
        def beside(self, store, name): ...
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from det_core.storage import FileEntry, Header, Owner, Staging, Store, StoredCheckpoint, scan

FILES = {
    "model.pt": bytes(range(256)) * 5000,
    "empty": b"",
    "sub/inner/a b.txt": b"text",
    "sub/\u00fcml\u00e4ut-\u4e2d.bin": b"\0" * 10,
}
DIRECTORIES = ["nothing/", "sub/", "sub/inner/"]
METADATA = {"steps_completed": 7, "note": "x", "nested": {"a": [1, None]}}


class CheckpointStoreSuite(ABC):
    """Inherit, and say how to make the store, how to damage what it keeps, and how to look at it."""

    @abstractmethod
    def make_store(self, folder: Path) -> Store:
        """Return a store that keeps its bytes in ``folder``; a second call returns one with the same checkpoints."""

    @abstractmethod
    def damage(self, store: Store, storage_id: str, path: str, change: Callable[[bytes], bytes] | None) -> None:
        """Change the bytes that the store keeps of a file, behind its back; None: remove the file."""

    @abstractmethod
    def beside(self, store: Store, name: str) -> bytes:
        """Return the bytes of a file that was put beside the checkpoints."""

    def test_put_files_are_read_back(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        found = self.make_store(tmp_path / "store").open("one")
        assert found.metadata() == METADATA
        assert set(found.manifest.resources) == {*FILES, *DIRECTORIES, "metadata.json"}
        assert all(found.manifest.resources[path] == len(data) for path, data in FILES.items())
        assert all(found.manifest.resources[path] == 0 for path in DIRECTORIES)
        found.copy_to(tmp_path / "out", [*FILES], DIRECTORIES)
        assert tree(tmp_path / "out") == FILES
        assert (tmp_path / "out" / "nothing").is_dir()

    def test_sealed_files_are_read_back(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        staging = store.begin("one", owner())
        fill(staging.path)
        commit_path(staging)
        found = store.open("one")
        found.check([*FILES, "metadata.json"])
        found.copy_to(tmp_path / "out", [*FILES], DIRECTORIES)
        assert tree(tmp_path / "out") == FILES
        assert found.metadata() == METADATA

    def test_file_of_many_chunks_is_read_back(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        source = tmp_path / "source"
        source.mkdir()
        block = os.urandom(1 << 20)
        with (source / "large").open("wb") as f:
            for i in range(40):
                f.write(block[i:] + block[:i])
        staging = store.begin("one", owner())
        listing = scan(store.disk, str(source))
        staging.commit(staging.put(listing), [], METADATA, header("one"))
        entry = store.open("one").manifest.files["large"]
        assert entry.size == 40 << 20
        assert entry.digests is not None and len(set(entry.digests)) == 3
        store.open("one").copy_to(tmp_path / "out", ["large"], [])
        assert (tmp_path / "out" / "large").read_bytes() == (source / "large").read_bytes()

    def test_checkpoint_is_listed_only_after_commit(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        assert store.list() == []
        staging = store.begin("one", owner())
        fill(staging.path)
        staging.seal(staging.scan_written())
        assert store.list() == []
        with raises(CheckpointNotFound, "one"):
            store.open("one")
        staging.abort()
        staging.abort()
        assert store.list() == []
        assert store.collect() == []

    def test_abort_after_commit_has_no_effect(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        staging = store.begin("one", owner())
        fill(staging.path)
        commit_path(staging)
        staging.abort()
        assert [found.storage_id for found in store.list()] == ["one"]
        store.open("one").check(FILES)

    def test_several_ranks_commit_one_checkpoint(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        first = store.begin("one", owner())
        stagings = [self.make_store(tmp_path / "store").join(first.ticket, rank) for rank in range(3)]
        for rank, staging in enumerate(stagings):
            assert staging.storage_id == "one"
            (staging.path / "sub").mkdir()
            (staging.path / "sub" / f"rank{rank}").write_text(f"from {rank}")
            (staging.path / "same").write_text("the same on all")
        written = [staging.scan_written() for staging in stagings]
        files: dict[str, FileEntry] = {}
        for rank, (staging, listing) in enumerate(zip(stagings, written, strict=True)):
            assert listing.directories == ["sub/"]
            assert set(listing.files) == {f"sub/rank{rank}", "same"}
            files |= staging.seal(listing.without({"same"} if rank else ()))
        stagings[0].commit(files, ["sub/"], METADATA, header("one"))
        found = store.open("one")
        found.check(found.manifest.files)
        assert everything(found, tmp_path) == {
            **{f"sub/rank{rank}": f"from {rank}".encode() for rank in range(3)},
            "same": b"the same on all",
        }

    def test_join_without_begin_is_rejected(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        staging = store.begin("one", owner())
        staging.abort()
        with raises(StorageError, "is not visible here"):
            store.join(staging.ticket, 1).start()

    def test_two_checkpoints_can_be_written_at_once(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stagings = {name: store.begin(name, owner()) for name in ("one", "two")}
        for staging in stagings.values():
            fill(staging.path)
        for name, staging in stagings.items():
            listing = staging.scan_written()
            staging.commit(staging.seal(listing), listing.directories, METADATA, header(name))
        assert {found.storage_id for found in store.list()} == {"one", "two"}

    def test_commit_of_an_existing_id_is_rejected(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        with raises(StorageError, "one"):
            staging = store.begin("one", owner())
            try:
                (staging.path / "other").write_text("other")
                commit_path(staging)
            finally:
                staging.abort()
        store.open("one").check(FILES)

    def test_list_is_sorted_by_restart_and_ordinal(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        order = [("c", 0, 1), ("a", 0, 2), ("d", 0, 10), ("b", 1, 1)]
        for name, restart, ordinal in reversed(order):
            stored(store, tmp_path, name, restart=restart, ordinal=ordinal)
        stored(store, tmp_path, "other", run_id="other run", restart=5)
        assert [found.storage_id for found in store.list("run")] == [name for name, _, _ in order]
        assert [found.storage_id for found in store.list("other run")] == ["other"]
        assert store.list("no run") == []
        assert len(store.list()) == 5

    def test_open_of_unknown_id_is_not_found(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        with raises(CheckpointNotFound, "nothing"):
            store.open("nothing")

    def test_id_that_leads_elsewhere_is_rejected(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        for storage_id in ("", ".", "..", "../x", "a/b", "/etc", ".det_core-tmp", "a\\b", "a\0b", "x" * 300):
            with raises(ValueError, "storage_id"):
                store.open(storage_id)
            with raises(ValueError, "storage_id"):
                store.delete(storage_id)
            with raises(ValueError, "storage_id"):
                store.begin(storage_id, owner())

    def test_check_detects_a_flipped_byte(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        self.damage(store, "one", "model.pt", lambda data: data[:77] + bytes([data[77] ^ 1]) + data[78:])
        with raises(CheckpointCorrupt, "model.pt"):
            store.open("one").check(FILES)
        store.open("one").check(FILES, digests=False)
        with raises(CheckpointCorrupt, "model.pt"):
            store.open("one").copy_to(tmp_path / "out", [*FILES], [])

    def test_check_detects_another_size(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        changes: dict[str, Callable[[bytes], bytes] | None]
        changes = {"short": lambda data: data[:-1], "long": lambda data: data + b"x", "gone": None}
        for name, change in changes.items():
            stored(store, tmp_path, name)
            self.damage(store, name, "sub/inner/a b.txt", change)
            for digests in (True, False):
                with raises(CheckpointCorrupt, "a b.txt"):
                    store.open(name).check(FILES, digests=digests)
            with raises(CheckpointCorrupt, "a b.txt"):
                store.open(name).copy_to(tmp_path / f"out-{name}", [*FILES], [])

    def test_metadata_that_is_damaged_raises(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        self.damage(store, "one", "metadata.json", lambda data: data.replace(b"7", b"8"))
        with raises(CheckpointCorrupt, "metadata.json"):
            store.open("one").metadata()

    def test_damaged_manifest_is_reported_and_not_listed(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        stored(store, tmp_path, "two", ordinal=2)
        self.damage(store, "two", ".det_core/manifest.json", lambda data: data[: len(data) // 2])
        with raises(CheckpointCorrupt, "manifest"):
            store.open("two")
        assert store.list("run")[-1].storage_id == "one"

    def test_manifest_with_paths_outside_is_rejected(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        (tmp_path / "secret").write_bytes(b"text")
        for i, path in enumerate(("../../secret", "/etc/passwd", "sub/../../secret", "sub//a", "./empty")):
            stored(store, tmp_path, f"c{i}")
            self.damage(
                store,
                f"c{i}",
                ".det_core/manifest.json",
                lambda data, path=path: data.replace(b"sub/inner/a b.txt", path.encode()),  # type: ignore[misc]
            )
            with raises(CheckpointCorrupt, "manifest"):
                store.open(f"c{i}")

    def test_checkpoint_deleted_during_a_read_is_not_found(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        found = store.open("one")
        self.make_store(tmp_path / "store").delete("one")
        for read in (
            lambda: found.check(found.manifest.files),
            lambda: found.check(found.manifest.files, digests=False),
            lambda: found.copy_to(tmp_path / "out", [*FILES], DIRECTORIES),
            lambda: found.metadata(),
        ):
            with raises(CheckpointNotFound, "was deleted while it was read"):
                read()

    def test_check_in_parts_covers_every_byte_once(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        self.damage(store, "one", "sub/inner/a b.txt", lambda data: b"TEXT")
        for parts in (1, 2, 3, 7):
            found = 0
            for part in range(parts):
                try:
                    store.open("one").check(FILES, part=part, parts=parts)
                except CheckpointCorrupt:
                    found += 1
            assert found == 1, f"{found} of {parts} parts found the damage"

    def test_copy_to_reports_every_byte(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        done: list[int] = []
        source = tmp_path / "source"
        fill(source)
        staging = store.begin("one", owner())
        listing = scan(store.disk, str(source))
        files = staging.put(listing, done.append)
        staging.commit(files, listing.directories, METADATA, header("one"))
        total = sum(map(len, FILES.values()))
        assert sum(done) == total
        store.open("one").copy_to(tmp_path / "out", [*FILES], [], done.append)
        assert sum(done) == 2 * total
        store.open("one").check(FILES, progress=done.append)
        assert sum(done) == 3 * total

    def test_delete_removes_one_whole_checkpoint(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        stored(store, tmp_path, "two")
        assert store.delete("one") == {}
        assert [found.storage_id for found in store.list()] == ["two"]
        with raises(CheckpointNotFound, "one"):
            store.open("one")
        assert store.delete("one") == {}
        assert store.delete("never there") == {}
        store.open("two").check(FILES)

    def test_delete_with_globs_removes_matching_files(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        remaining = store.delete("one", ["*.pt", "**/*.txt", "../*", "/etc/*"])
        left = {"empty": b"", "sub/\u00fcml\u00e4ut-\u4e2d.bin": b"\0" * 10}
        assert set(remaining) == {*left, "metadata.json", "nothing/", "sub/"}
        found = store.open("one")
        assert found.manifest.resources == remaining
        found.check(found.manifest.files)
        assert everything(found, tmp_path) == left
        assert [h.storage_id for h in store.list()] == ["one"]
        assert store.delete("one", ["*.pt"]) == remaining

    def test_delete_of_every_file_removes_the_checkpoint(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        assert store.delete("one", ["**"]) == {}
        assert store.list() == []

    def test_collect_removes_files_of_dead_writers(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        alive = store.begin("alive", owner())
        dead = Owner(**{**vars(owner()), "pid": 2**22 + 1, "started": 5})
        elsewhere = Owner(**{**vars(dead), "host": "0" * 12})
        for name, who in (("elsewhere", elsewhere), ("dead", dead)):
            staging = store.begin(name, who)
            fill(staging.path)
            staging.start()
        assert store.collect() == ["dead"]
        assert store.collect(Owner(**{**vars(owner()), "restart": 1})) != []
        assert store.collect() == []
        alive.abort()

    def test_scan_written_replaces_links_by_copies(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        outside = tmp_path / "outside"
        outside.write_bytes(b"as it was")
        staging = store.begin("one", owner())
        (staging.path / "folder").mkdir()
        (staging.path / "folder" / "file").write_bytes(b"file")
        (staging.path / "link").symlink_to("folder")
        os.link(outside, staging.path / "hard")
        listing = staging.scan_written()
        assert not listing.links and not any(source.shared for source in listing.files.values())
        assert {*listing.directories} == {"folder/", "link/"}
        outside.write_bytes(b"another")
        staging.commit(staging.seal(listing), listing.directories, METADATA, header("one"))
        expected = {"folder/file": b"file", "link/file": b"file", "hard": b"as it was"}
        assert everything(store.open("one"), tmp_path) == expected

    def test_scan_written_removes_reserved_names(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        staging = store.begin("one", owner())
        (staging.path / ".det_core").mkdir()
        (staging.path / ".det_core" / "manifest.json").write_text("of another")
        (staging.path / "metadata.json").write_text("of another")
        (staging.path / "file").write_text("text")
        commit_path(staging)
        assert store.open("one").metadata() == METADATA
        assert everything(store.open("one"), tmp_path) == {"file": b"text"}

    def test_read_lease_marks_a_checkpoint_in_use(self, tmp_path: Path) -> None:
        store, other = self.make_store(tmp_path / "store"), self.make_store(tmp_path / "store")
        assert store.in_use() == set()
        for name in ("one", "two.with.dots"):
            stored(store, tmp_path, name)
        with store.read_lease("one", owner()):
            with other.read_lease("one", owner()), other.read_lease("two.with.dots", owner()):
                assert store.in_use() == other.in_use() == {"one", "two.with.dots"}
                assert store.collect() == []
            assert store.in_use() == {"one"}
            assert [found.storage_id for found in store.list()] == ["one", "two.with.dots"]
        assert store.in_use() == set()

    def test_read_lease_is_released_after_an_error(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        with raises(ArithmeticError, "x"), store.read_lease("one", owner()):
            raise ArithmeticError("x")
        assert store.in_use() == set()

    def test_read_lease_of_a_dead_process_is_invalid(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        stored(store, tmp_path, "one")
        stored(store, tmp_path, "two")
        dead = Owner(**{**vars(owner()), "pid": 2**22 + 1, "started": 5})
        elsewhere = Owner(**{**vars(dead), "host": "0" * 12})
        with store.read_lease("one", dead), store.read_lease("two", elsewhere):
            assert store.in_use() == {"two"}, "of another host nobody knows"
            store.collect()
            assert store.in_use() == {"two"}

    def test_put_file_replaces_and_remove_folder_removes(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        source = tmp_path / "source file"
        for data in (b"one", b"", b"another" * 100_000):
            source.write_bytes(data)
            store.put_file(source, "tensorboard/run/rank-0/events 1")
            assert self.beside(store, "tensorboard/run/rank-0/events 1") == data
        assert store.list() == []
        assert source.exists()
        with raises(StorageError, "nothing"):
            store.put_file(tmp_path / "nothing", "tensorboard/x")
        store.put_file(source, "tensorboard/run 2/events")
        for _ in range(2):
            store.remove_folder("tensorboard/run")
        assert self.beside(store, "tensorboard/run 2/events") == source.read_bytes()
        with raises(FileNotFoundError, ""):
            self.beside(store, "tensorboard/run/rank-0/events 1")
        with raises(ValueError, "is not a path below"):
            store.remove_folder("../elsewhere")

    def test_check_writable_of_a_working_store_leaves_nothing(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        store.check_writable()
        store.check_writable()
        assert store.list() == [] and store.collect() == []

    def test_begin_of_a_later_restart_collects_files_of_an_earlier(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        earlier = Owner(**{**vars(owner()), "host": "0" * 12})
        other = Owner(**{**vars(Owner.current("another run", 0)), "host": "0" * 12})
        store.begin("earlier", earlier).start()
        store.begin("other", other).start()
        store.begin("now", Owner.current("run", 1)).start()
        assert store.collect(Owner.current("run", 1)) == []
        assert store.collect(Owner.current("another run", 1)) == ["other"]


def owner() -> Owner:
    """Return this process as the first restart of the run."""
    return Owner.current("run", 0)


def header(storage_id: str, *, run_id: str = "run", restart: int = 0, ordinal: int = 1) -> Header:
    """Return the header of a checkpoint."""
    return Header(run_id, restart, ordinal, "2026-11-21T12:00:00.000000+00:00", 7, storage_id)


def fill(folder: Path) -> None:
    """Write the suite's files into a folder."""
    for directory in DIRECTORIES:
        (folder / directory).mkdir(parents=True, exist_ok=True)
    for path, data in FILES.items():
        (folder / path).write_bytes(data)


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files below a directory."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(
    store: Store, tmp_path: Path, storage_id: str, *, run_id: str = "run", restart: int = 0, ordinal: int = 1
) -> None:
    """Put the suite's files into the store, as a complete checkpoint."""
    source = tmp_path / "source"
    fill(source)
    staging = store.begin(storage_id, owner())
    listing = scan(store.disk, str(source))
    head = header(storage_id, run_id=run_id, restart=restart, ordinal=ordinal)
    staging.commit(staging.put(listing), listing.directories, METADATA, head)


def commit_path(staging: Staging) -> None:
    """Commit what was written into the path."""
    listing = staging.scan_written()
    staging.commit(staging.seal(listing), listing.directories, METADATA, header(staging.storage_id))


def everything(found: StoredCheckpoint, tmp_path: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint, without its metadata."""
    out = tmp_path / f"everything-{os.urandom(4).hex()}"
    found.copy_to(out, set(found.manifest.files) - {"metadata.json"}, found.manifest.directories)
    return tree(out)


@contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    """Fail unless the block raises ``kind`` with ``text`` in its message."""
    try:
        yield
    except kind as e:
        assert text in str(e), f"{text!r} is not in the message: {e}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")
