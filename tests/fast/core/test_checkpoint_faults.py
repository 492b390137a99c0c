"""Every single call to the disk fails once: what is listed is whole, and what is not can be collected."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointError, StorageError
from det_core.storage import DirectoryStore
from support import TESTS, warm
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, listed, nothing_is_left_over, tree
from support.disks import FaultyDisk


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory if possible, as a thousand checkpoints are synced here."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


torch = pytest.importorskip("torch")
WEIGHTS = torch.arange(300_000.0)
Operation = Callable[[CheckpointContext, str, Path], object]


def upload(context: CheckpointContext, old: str, folder: Path) -> None:
    context.upload(folder / "source", STEPS)


def store_path(context: CheckpointContext, old: str, folder: Path) -> None:
    with context.store_path(STEPS) as (path, _):
        fill(path)
        (path / "link").symlink_to("rng")


def upload_in_background(context: CheckpointContext, old: str, folder: Path) -> None:
    context.upload(folder / "source", STEPS, blocking=False)
    context.close()


def store_path_in_background(context: CheckpointContext, old: str, folder: Path) -> None:
    with context.store_path(STEPS, blocking=False) as (path, _):
        fill(path)
        (path / "link").symlink_to("rng")
    context.close()


def save_in_background(context: CheckpointContext, old: str, folder: Path) -> None:
    context.save({"weights": WEIGHTS, "rest": ["text", 1]}, STEPS, name="sub/state.pt", blocking=False)
    context.close()


def restore(context: CheckpointContext, old: str, folder: Path) -> None:
    with context.restore_path(old):
        pass
    (folder / "restored").touch()


def delete(context: CheckpointContext, old: str, folder: Path) -> None:
    context.delete(old)


def every_call_fails_once(operation: Operation, folder: Path, how: str) -> list[tuple[Path, str, Recorder, str]]:
    """Do ``operation`` anew for each call that it makes; returns folder, old id, recorder and what failed of each."""
    outcomes = []
    for at in range(1, 1000):
        work = folder / f"{how}-{at}"
        fill(work / "source")
        recorder = Recorder()
        with alone() as distributed:
            old = recorder.context(distributed, work / "store").upload(work / "source", STEPS)
            recorder.registered.clear()
            disk = FaultyDisk(str(work / "store"), at, how)
            context = recorder.context(distributed, work / "store", disk=disk)
            try:
                operation(context, old, work)
            except StorageError as e:
                assert disk.struck, "a StorageError without a fault"
                assert str(work) in str(e)
                assert "cannot " in str(e)
                assert e.errno is not None
            else:
                if not disk.struck:
                    return outcomes
            context.close()
        assert tree(work / "source") == FILES, "the user's folder was changed"
        outcomes.append((work, old, recorder, disk.struck))
    raise AssertionError("the operation never ends")


@pytest.mark.parametrize(
    ("operation", "how"),
    [(upload, "short"), (store_path, "EIO"), (save_in_background, "dead")],  # the others: tests/long/test_core_kills.py
)
def test_a_checkpoint_is_listed_and_registered_or_it_is_not_there(operation: Operation, how: str, memory: Path) -> None:
    outcomes = every_call_fails_once(operation, memory, how)
    assert {"write", "sync", "rename", "open"} <= {struck for _, _, _, struck in outcomes}
    for work, old, recorder, struck in outcomes:
        new = [record["storage_id"] for record in recorder.registered]
        found = listed(work / "store")
        assert old in found
        if how != "dead":  # a disk that is gone when the rename cannot be taken back leaves a checkpoint: complete
            assert sorted(found) == sorted([old, *new]), f"after {struck}"
        if how != "dead" and struck not in ("remove", "remove folder", "list", "look at"):
            assert list((work / "store").glob(".det_core-tmp/*")) == [], f"bytes are left after {struck}"
        nothing_is_left_over(work / "store")


@pytest.mark.parametrize(("existing", "how"), [(False, "dead"), (True, "short")])
def test_download_that_fails_leaves_the_folder_as_it_was(existing: bool, how: str, memory: Path) -> None:
    def download(context: CheckpointContext, old: str, folder: Path) -> None:
        if existing:
            fill(folder / "target", {"mine": b"mine", "model.pt": b"older"})
        context.download(old, folder / "target")

    outcomes = every_call_fails_once(download, memory, how)
    assert {"write", "read", "rename", "open", "look at"} <= {struck for _, _, _, struck in outcomes}
    for work, old, _, struck in outcomes:
        assert listed(work / "store") == [old]
        found = tree(work / "target") if (work / "target").exists() else {}
        named = {path: data for path, data in found.items() if not path.startswith(".det_core-tmp-")}
        whole = {**FILES, "metadata.json": b'{\n  "steps_completed": 3\n}'}
        if not existing:
            assert named in ({}, whole)
        else:
            assert named.pop("mine") == b"mine"
            if how == "dead":  # a disk that is gone while files move in takes nothing back: each is one or the other
                assert {"model.pt"} <= named.keys() <= whole.keys()
                assert all(
                    data in (whole[path], b"older" if path == "model.pt" else None) for path, data in named.items()
                )
                continue
            assert named in ({"model.pt": b"older"}, whole), f"half of it after {struck}"
        if how != "dead" and struck not in ("remove", "remove folder", "list"):
            aside = [*work.glob(".det_core-tmp-*"), *(work / "target").glob(".det_core-tmp-*")]
            assert aside == [], f"left after {struck}"


def test_a_restore_that_fails_says_so(memory: Path) -> None:
    for work, old, recorder, _ in every_call_fails_once(restore, memory, "EIO"):
        assert listed(work / "store") == [old]
        assert bool(recorder.restores) == (work / "restored").exists(), "only the mark that it is in use may fail"


def test_a_delete_unlists_first(memory: Path) -> None:
    outcomes = every_call_fails_once(delete, memory, "dead")
    assert {"rename", "remove", "remove folder"} <= {struck for _, _, _, struck in outcomes}
    for work, old, recorder, _ in outcomes:
        assert listed(work / "store") in ([old], [])
        with alone() as distributed:
            recorder.context(distributed, work / "store").delete(old)
        assert listed(work / "store") == []
        nothing_is_left_over(work / "store")


def test_a_partial_delete_leaves_a_checkpoint_that_verifies(memory: Path) -> None:
    def partial(context: CheckpointContext, old: str, folder: Path) -> None:
        context._store.delete(old, ["sub/**"])

    for work, old, _, struck in every_call_fails_once(partial, memory, "EIO"):
        checkpoint = DirectoryStore(work / "store").open(old)
        checkpoint.check(checkpoint.manifest.files)
        assert set(checkpoint.manifest.files) in ({*FILES, "metadata.json"}, {"model.pt", "rng", "metadata.json"}), (
            struck
        )


@pytest.mark.parametrize("name", ["upload", "save_in_background", "download", "delete"])
def test_death_at_every_call(name: str, memory: Path) -> None:
    done = warm.run(["-m", "support.dying", name, memory], cwd=TESTS)
    assert done.returncode == 0, done.stdout[-3000:]
    deaths = [path for path in memory.iterdir() if path.is_dir()]
    assert len(deaths) > (10 if name == "delete" else 25), done.stdout
    for work in deaths:
        old = (work / "old").read_text()
        found = listed(work / "store")
        assert (old in found) or name == "delete"
        assert len(found) <= 2
        if name == "download" and (work / "target").exists():
            assert tree(work / "target") == {**FILES, "metadata.json": b'{\n  "steps_completed": 3\n}'}
        nothing_is_left_over(work / "store")
        assert tree(work / "source") == FILES


def test_an_error_keeps_its_number(memory: Path) -> None:
    with alone() as distributed:
        disk = FaultyDisk("here", 3, "ENOSPC")
        context = Recorder().context(distributed, memory / "store", disk=disk)
        with pytest.raises(StorageError, match="here") as caught:
            context.upload(fill(memory / "source"), STEPS)
    assert caught.value.errno == 28
    assert isinstance(caught.value, OSError) and isinstance(caught.value, CheckpointError)
