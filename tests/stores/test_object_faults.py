"""Every single call to an object store fails once: what is listed is whole, and what is not can be collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointError, StorageError
from det_core.storage import Owner, open_store
from det_core.storage._object_store import ObjectStore
from support import TESTS
from support.buckets import FaultyDriver, closing, keys, object_store, unfinished
from support.checkpoints import FILES, RUN, STEPS, Recorder, alone, fill, tree
from support.servers import S3Server

PERMANENT = ("EIO", "ENOSPC", "EACCES", "dead", "lost")
LARGE = {**FILES, "large": os.urandom(1 << 20) * 35}
"""With a file of three parts."""
Operation = Callable[[CheckpointContext, str, Path], object]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory, if the machine has one."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def upload(context: CheckpointContext, old: str, work: Path) -> None:
    context.upload(work / "source", STEPS)


def store_path(context: CheckpointContext, old: str, work: Path) -> None:
    with context.store_path(STEPS) as (path, _):
        fill(path)
        (path / "link").symlink_to("rng")


def download(context: CheckpointContext, old: str, work: Path) -> None:
    context.download(old, work / "target")


def delete(context: CheckpointContext, old: str, work: Path) -> None:
    context.delete(old)


class Place:
    """Where stores are made: on a disk, or, given a server, in a bucket of S3."""

    def __init__(self, server: S3Server | None = None) -> None:
        self.server = server
        self.bucket = server.make_bucket() if server is not None else ""

    def store(self, work: Path) -> ObjectStore:
        """Return the store of a directory."""
        if self.server is None:
            return object_store(f"local://{work}/store", work / "scratch")
        found = open_store(self.server.storage(self.bucket, work.name), work, scratch=work / "scratch")
        assert isinstance(found, ObjectStore)
        return found


@pytest.fixture
def place() -> Place:
    """Return a place on a disk; ``tests/long/test_storage_faults.py`` has S3 and all other ways."""
    return Place()


class Outcome(NamedTuple):
    """Outcome of one failure."""

    root: str
    work: Path
    old: str
    recorder: Recorder
    struck: str
    error: CheckpointError | None


def every_call_fails_once(
    operation: Operation,
    place: Place,
    folder: Path,
    how: str,
    files: dict[str, bytes],
    only: tuple[str, ...] = ("",),
) -> list[Outcome]:
    """Do ``operation`` anew for each try of a call that it makes, or of those alone that begin with ``only``."""
    outcomes = []
    for at in range(1, 1000):
        work = folder / f"{how}-{only[0]}-{at}"
        fill(work / "source", files)
        recorder, error = Recorder(), None
        with alone() as distributed, closing() as opened:
            store = opened(place.store(work))
            old = recorder.context(distributed, work, store=store).upload(work / "source", STEPS)
            recorder.registered.clear()
            driver = FaultyDriver(store.driver, at, how, only)
            context = recorder.context(distributed, work, store=ObjectStore(driver, work / "scratch"))
            try:
                operation(context, old, work)
            except CheckpointError as e:
                error = e
            context.close()
            if not driver.struck:
                assert error is None
                return outcomes
        assert tree(work / "source") == files, "the user's folder was changed"
        outcomes.append(Outcome(store.root, work, old, recorder, driver.struck, error))
    raise AssertionError("the operation never ends")


def listed(store: ObjectStore) -> list[str]:
    """Return the listed checkpoints, each compared with its manifest byte for byte."""
    found = [header.storage_id for header in store.list()]
    for storage_id in found:
        checkpoint = store.open(storage_id)
        checkpoint.check(checkpoint.manifest.files)
        stored = {key.removeprefix(f"{storage_id}/") for key in keys(store, f"{storage_id}/")}
        assert stored - {".det_core/manifest.json"} == set(checkpoint.manifest.files)
        assert checkpoint.metadata()["steps_completed"] >= 0
    return found


def nothing_is_left_over(store: ObjectStore, scratch: Path) -> None:
    """Check that a later restart's collection leaves only the listed checkpoints."""
    later = Owner.current(RUN, 1)
    staging = store.begin("later", later)
    staging.start()  # collects
    staging.abort()
    assert store.collect(later) == []
    assert {key.split("/", 1)[0] for key in keys(store)} == set(listed(store))
    assert unfinished(store) == []
    assert not [path for path in scratch.rglob("*") if path.is_file()]


def names_what_failed(outcome: Outcome) -> None:
    assert isinstance(outcome.error, StorageError)
    text = str(outcome.error)
    assert outcome.root in text
    assert f"cannot {outcome.struck}" in text
    assert outcome.error.errno is not None


@pytest.mark.parametrize(("operation", "how"), [(store_path, "EIO"), (upload, "dead")])
def test_checkpoint_with_any_failing_call_is_registered_or_absent(
    operation: Operation, how: str, place: Place, memory: Path
) -> None:
    whole_or_not_there(operation, place, memory, how)


def whole_or_not_there(operation: Operation, place: Place, memory: Path, how: str) -> None:
    outcomes = every_call_fails_once(operation, place, memory, how, FILES)
    assert {"write", "list", "delete"} <= {outcome.struck for outcome in outcomes}
    for outcome in outcomes:
        with closing() as opened:
            store = opened(place.store(outcome.work))
            new = [record["storage_id"] for record in outcome.recorder.registered]
            assert sorted(listed(store)) == sorted([outcome.old, *new]), outcome
            assert bool(new) == (outcome.error is None)
            if outcome.error is not None:
                names_what_failed(outcome)
            if how != "dead":
                nothing_is_left_over(store, outcome.work / "scratch")


@pytest.mark.parametrize("how", ["EIO", "short"])
def test_download_with_any_failing_call_leaves_whole_files_or_none(how: str, place: Place, memory: Path) -> None:
    outcomes = every_call_fails_once(download, place, memory, how, FILES)
    assert "read" in {outcome.struck for outcome in outcomes}
    whole = {**FILES, "metadata.json": b'{\n  "steps_completed": 3\n}'}
    for outcome in outcomes:
        found = tree(outcome.work / "target") if (outcome.work / "target").exists() else {}
        assert found == ({} if outcome.error else whole), outcome
        assert not [*outcome.work.glob(".det_core-tmp-*")]


@pytest.mark.parametrize("how", ["dead"])
def test_half_deleted_checkpoint_is_unlisted_and_removed_by_the_next_delete(
    how: str, place: Place, memory: Path
) -> None:
    for outcome in every_call_fails_once(delete, place, memory, how, FILES):
        with closing() as opened:
            store = opened(place.store(outcome.work))
            assert listed(store) in ([outcome.old], [])
            assert outcome.error is not None
            names_what_failed(outcome)
            assert store.delete(outcome.old) == {}
            assert not keys(store)


def test_failed_collection_can_be_repeated(tmp_path: Path) -> None:
    for at in range(1, 100):
        url = f"local://{tmp_path}/{at}"
        with closing() as opened:
            store = opened(object_store(url, tmp_path / "scratch"))
            dead = Owner(**{**vars(Owner.current(RUN, 0)), "pid": 2**22 + 1, "started": 5})
            fill(store.begin("dead", dead).path)
            staging = store.begin("half", dead)
            fill(staging.path)
            staging.seal(staging.scan_written())
            driver = FaultyDriver(store.driver, at, "EIO")
            try:
                ObjectStore(driver, tmp_path / "scratch").collect()
            except StorageError as e:
                assert f"cannot {driver.struck}" in str(e)
            store.collect()
            assert not keys(store), f"after call {at}: {driver.struck}"
            if not driver.struck:
                return
    raise AssertionError("the collection never ends")


@pytest.mark.parametrize(("name", "how"), [("store_path", "exit"), ("delete", "exit-after")])
def test_death_at_any_call_leaves_whole_checkpoints(name: str, how: str, place: Place, memory: Path) -> None:
    command = [sys.executable, "-m", "support.dying_objects", name, how, str(memory)]
    if place.server is not None:
        command.append(json.dumps(place.server.storage(place.bucket)))
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    deaths = sorted(memory.glob("death-*"))
    assert len(deaths) >= 5
    for work in deaths:
        with closing() as opened:
            store = opened(place.store(work))
            old = (work / "old").read_text()
            found = listed(store)
            assert name == "delete" or old in found
            assert len(found) <= 2
            nothing_is_left_over(store, work / "scratch")
            assert name != "delete" or not keys(store) or listed(store) == [old]
