"""Retention on object stores: every call fails once, and what is listed is whole, the newest among it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core import core
from det_core.core._checkpoint._retention import Retention
from det_core.storage import Owner, open_store
from det_core.storage._object_store import ObjectStore
from support.buckets import FaultyDriver, closing, contents, object_store
from support.removals import Training
from support.servers import S3Server
from support.stored import put

FILES = {"a": b"a" * 1000, "b/c": b"c"}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory, if the machine has one."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def fill(store: ObjectStore, scratch: Path) -> None:
    """Write checkpoints c1 to c4 of the run, and one of another."""
    put(store, "another", 5, scratch, run_id="another", files=FILES)
    for ordinal in range(1, 5):
        put(store, f"c{ordinal}", 10 * ordinal, scratch, ordinal=ordinal, files=FILES)


def whole(store: ObjectStore) -> set[str]:
    """Return the listed checkpoints, each compared with its manifest."""
    found = {header.storage_id for header in store.list()}
    for storage_id in found:
        checkpoint = store.open(storage_id)
        checkpoint.check(checkpoint.manifest.files)
    return found


@pytest.mark.parametrize("how", ["lost", "EIO"])  # the others: tests/long/test_storage_objects.py
def test_gc_with_any_failing_call_deletes_no_kept_checkpoint(how: str, memory: Path) -> None:
    struck = set()
    for at in range(1, 1000):
        work = memory / str(at)
        work.mkdir()
        with closing() as opened:
            store = opened(object_store(f"local://{work}/store", work / "scratch"))
            fill(store, work)
            driver = FaultyDriver(store.driver, at, how)
            told: list[str] = []
            retention = Retention(
                core.KeepLatest(2),
                ObjectStore(driver, work / "scratch"),
                "run",
                deleted=lambda i, _, told=told: told.append(i),
            )
            gone = retention.apply()
            assert told == gone
            there = whole(store)
            assert {"another", "c3", "c4"} <= there <= {"another", "c1", "c2", "c3", "c4"}
            assert not set(gone) & there
            struck.add(driver.struck)
            store.collect(Owner.current("run", 1))
            Retention(core.KeepLatest(2), store, "run").apply()
            assert whole(store) == {"another", "c3", "c4"}
            assert {key.split("/")[0] for key in contents(store)} == {"another", "c3", "c4"}, "nothing else is left"
        if not driver.struck:
            break
    else:
        raise AssertionError("it never ends")
    assert {"list", "read", "delete", "write"} <= struck


def test_on_a_server(moto_server: S3Server, tmp_path: Path) -> None:
    with closing() as opened:
        storage = moto_server.storage(moto_server.make_bucket(), "some/prefix")
        store = opened(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
        fill(store, tmp_path)
        with store.read_lease("c2", Owner.current("reader", 0)):
            assert Retention(core.KeepLatest(2), store, "run").apply() == ["c1"]
        assert Retention(core.KeepLatest(2), store, "run").apply() == ["c2"]
        assert whole(store) == {"another", "c3", "c4"}
        assert {key.split("/")[0] for key in contents(store)} == {"another", "c3", "c4"}


def test_training_beside_random_removals_on_s3_keeps_what_is_promised(home: Path, moto_server: S3Server) -> None:
    training = Training(moto_server.storage(moto_server.make_bucket(), "some/prefix"), seed=3)
    training.run(4)
    assert training.removals > 0
