"""A checkpoint of one file that is laid out before its bytes are there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from det_core.errors import StorageError
from det_core.storage import DirectoryStore, Header, Manifest, Owner
from det_core.storage._draft import Draft, draft
from support.disks import Counting

OWNER = Owner.current("run", 0)
HEADER = Header("run", 0, 1, "2026-11-23T00:00:00Z", 7, "one")
METADATA = {"steps_completed": 7, "why": "ä test"}
NAMES = ["state.pt", "deep/er/state.pt"]


def save(store: DirectoryStore, name: str = "state.pt", parts: tuple[bytes, ...] = (b"one", b"two")) -> Manifest:
    begun = draft(store, "one", OWNER, name, METADATA)
    try:
        return finish(begun, parts)
    except BaseException:
        begun.abort()
        raise


def finish(begun: Draft, parts: tuple[bytes, ...]) -> Manifest:
    steps = begun.write(parts)
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return begun.commit(e.value, HEADER)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", NAMES)
def test_is_what_was_written(name: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    told = save(store, name)
    assert [found.storage_id for found in store.list()] == ["one"]
    checkpoint = store.open("one")
    assert checkpoint.manifest == told
    checkpoint.check(sorted(told.files))
    assert (tmp_path / "one" / name).read_bytes() == b"onetwo"
    assert json.loads((tmp_path / "one/metadata.json").read_text()) == METADATA
    assert not os.listdir(tmp_path / ".det_core-tmp")


@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_is_on_the_disk_before_it_has_its_name(name: str, tmp_path: Path) -> None:
    disk = Counting()
    store = DirectoryStore(tmp_path, disk=disk)
    save(store, name)
    disk.done.clear()
    finish(draft(store, "one-more", OWNER, name, METADATA), (b"one",))
    aside = f"{tmp_path}/.det_core-tmp/one-more.{OWNER.tag}"
    renamed = disk.done.index(("rename", f"{tmp_path}/one-more"))
    synced = {path for operation, path in disk.done[:renamed] if operation == "sync"}
    files = {f"{aside}/{path}" for path in (name, "metadata.json", ".det_core/manifest.json")}
    above = {folder for path in files for folder in map(str, Path(path).parents) if folder.startswith(aside)}
    assert synced == files | above
    assert disk.done[renamed + 1 :].count(("sync", str(tmp_path))) == 1


def test_laying_it_out_waits_for_nothing(tmp_path: Path) -> None:
    disk = Counting()
    store = DirectoryStore(tmp_path, disk=disk)
    save(store)
    disk.done.clear()
    begun = draft(store, "one-more", OWNER, "state.pt", METADATA)
    assert {operation for operation, _ in disk.done} == {"make folder", "open", "write"}
    begun.abort()


@pytest.mark.parametrize("name", NAMES)
def test_whatever_fails_nothing_is_left_of_it(name: str, tmp_path: Path) -> None:
    counting, before, refused = Counting(), open_files(), 0
    save(DirectoryStore(tmp_path / "all", disk=counting), name)
    for number, (operation, path) in enumerate(counting.done):
        disk = Counting(fail=number)
        store = DirectoryStore(tmp_path / str(number), disk=disk)
        try:
            save(store, name)
        except StorageError as e:
            refused += 1
            path = path.replace(f"{tmp_path}/all", store.root)
            assert str(e.args[-1]) == f"checkpoint store store: cannot {operation} {path}: Input/output error"
            assert store.list() == []
        else:
            assert operation == "list", "only what dead writers left may stay"
            assert [found.storage_id for found in store.list()] == ["one"]
        aside = Path(store.root, ".det_core-tmp")
        assert not aside.exists() or not os.listdir(aside)
        assert open_files() == before
    assert refused == len(counting.done) - 1


def test_one_that_is_there_already_stays_as_it_is(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store)
    with pytest.raises(StorageError, match=r"cannot commit .*/one: a checkpoint of that id is there"):
        save(store, parts=(b"other",))
    assert (tmp_path / "one/state.pt").read_bytes() == b"onetwo"
    assert not os.listdir(tmp_path / ".det_core-tmp")


def test_one_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    store, before = DirectoryStore(tmp_path), open_files()
    draft(store, "one", OWNER, "state.pt", METADATA).abort()
    assert open_files() == before
    assert not os.listdir(tmp_path / ".det_core-tmp")
    assert store.list() == []


def test_what_is_on_the_disk_is_no_longer_in_memory(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with open(other, "wb") as f:
        f.write(bytes(1 << 20))
        os.fsync(f.fileno())
    if not in_memory(other):
        pytest.skip("the file system does not say what is in memory")
    for n in range(100):  # the kernel is asked, and need not do it: pages that another processor holds stay
        save(DirectoryStore(tmp_path / str(n)), parts=(bytes(1 << 20),))
        files = [path for path in (tmp_path / str(n) / "one").rglob("*") if path.is_file()]
        assert len(files) == 3
        if not any(map(in_memory, files)):
            return
    pytest.fail("of a hundred checkpoints all stay in memory")


def in_memory(path: Path) -> bool:
    """Whether the beginning of a file can be read without waiting for the disk."""
    with open(path, "rb") as f:
        try:
            return os.preadv(f.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:
            return False
