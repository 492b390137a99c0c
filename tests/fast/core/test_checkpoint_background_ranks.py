"""Saving in the background by several ranks: their order, their failures, their deaths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import support
from det_core import core
from det_core.core._checkpoint import CheckpointContext
from det_core.errors import (
    CheckpointBusy,
    CheckpointConflict,
    CheckpointError,
    CollectiveMismatch,
    PeerLost,
    StorageError,
)
from det_core.storage import DirectoryStore, Disk
from support.checkpoints import FILES, STEPS, Recorder, fill, listed, nothing_is_left_over, tree
from support.disks import FaultyDisk
from support.ranks import running
from support.threads import as_ranks

TESTS = str(support.TESTS)


class Copies(Disk):
    """Keeps which files a rank made."""

    def __init__(self) -> None:
        super().__init__("counted")
        self.made: set[str] = set()

    def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "open" and "/part-" in path and args[1] & os.O_CREAT:
            self.made.add(path)
        return super().do(operation, path, function, *args)


class Job:
    """Ranks as threads, each with a checkpoint context on one store."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.recorders = [Recorder() for _ in range(4)]

    def run(self, size: int, work: Callable[[CheckpointContext, int], Any]) -> list[Any]:
        """Return the results by rank, close each context, and raise errors of closing."""

        def rank(distributed: core.DistributedContext) -> Any:
            context = self.recorders[distributed.rank].context(distributed, self.store)
            try:
                return work(context, distributed.rank)
            finally:
                context.close()

        return as_ranks(size, rank)

    def errors(self, size: int, work: Callable[[CheckpointContext, int], Any]) -> list[BaseException | None]:
        """Return the error of each rank's work, or of closing after it."""

        def rank(distributed: core.DistributedContext) -> BaseException | None:
            context = self.recorders[distributed.rank].context(distributed, self.store)
            try:
                work(context, distributed.rank)
            except BaseException as e:
                with suppress(CheckpointError):
                    context.close()
                return e
            try:
                context.close()
            except (CheckpointError, PeerLost) as e:
                return e
            return None

        return as_ranks(size, rank)

    @property
    def registered(self) -> list[str]:
        """The checkpoints that were registered, in order; only the chief may."""
        assert not any(recorder.registered for recorder in self.recorders[1:])
        return [record["storage_id"] for record in self.recorders[0].registered]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_store_path_is_the_union(job: Job) -> None:
    size = 4

    def work(context: CheckpointContext, rank: int) -> list[str]:
        ids = []
        for step in range(3):
            with context.store_path({"steps_completed": step}, shard=True, blocking=False) as (path, storage_id):
                fill(path, {f"of{rank}/file": b"%d %d" % (rank, step), "same": b"same"})
            ids.append(storage_id)
        return ids

    (ids,) = {tuple(found) for found in job.run(size, work)}
    assert [*ids] == job.registered
    assert set(listed(job.store)) == set(ids)
    for step, storage_id in enumerate(ids):
        found = tree(job.store / storage_id)
        found.pop("metadata.json")
        assert found == {"same": b"same"} | {f"of{rank}/file": b"%d %d" % (rank, step) for rank in range(size)}
    nothing_is_left_over(job.store, restart=0)


def test_upload_is_the_union_as_it_was(job: Job, tmp_path: Path) -> None:
    size = 3

    def work(context: CheckpointContext, rank: int) -> str:
        source = None if rank == size - 1 else fill(tmp_path / f"source{rank}", {f"{rank}": b"%d" % rank, "all": b"a"})
        storage_id = context.upload(source, STEPS, shard=True, blocking=False)
        if source is not None:
            fill(source, {f"{rank}": b"x", "all": b"%d" % rank})
        return storage_id

    (storage_id,) = set(job.run(size, work))
    found = tree(job.store / storage_id)
    found.pop("metadata.json")
    assert found == {"all": b"a"} | {f"{rank}": b"%d" % rank for rank in range(size - 1)}
    assert listed(job.store) == job.registered == [storage_id]
    nothing_is_left_over(job.store, restart=0)


def test_ranks_with_one_folder_bring_it_once(job: Job, tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    disks = [Copies(), Copies(), Copies()]

    def work(context: CheckpointContext, rank: int) -> str:
        context._store.disk = disks[rank]
        return context.upload(source, STEPS, shard=True, blocking=False)

    (storage_id,) = set(job.run(3, work))
    assert sorted(len(disk.made) for disk in disks) == [0, 0, len(FILES)]
    assert listed(job.store) == [storage_id]
    assert tree(source) == FILES


def test_files_that_differ_are_told_in_the_background(job: Job, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        source = fill(tmp_path / f"source{rank}", {"model": b"%d" % (rank // 2), f"{rank}": b"x"})
        context.upload(source, STEPS, shard=True, blocking=False)

    for error in job.errors(3, work):
        assert isinstance(error, CheckpointConflict) and "model (ranks 0, 1, 2)" in str(error)
    nothing_is_left_over(job.store, restart=0)


def test_files_of_another_size_are_told_at_once(job: Job, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        source = fill(tmp_path / f"source{rank}", {"model": b"x" * rank})
        with pytest.raises(CheckpointConflict, match=r"model \(ranks 0, 1\)"):
            context.upload(source, STEPS, shard=True, blocking=False)

    job.run(2, work)
    assert not job.store.exists()


def test_ranks_that_ask_for_different_uploads_are_told(job: Job, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        context.upload(fill(tmp_path / f"s{rank}"), STEPS, shard=True, blocking=rank == 0)

    for error in job.errors(2, work):
        assert isinstance(error, CollectiveMismatch)
        assert "upload on rank 0" in str(error) and "upload(blocking=False) on rank 1" in str(error)


@pytest.mark.parametrize(("failing", "then"), [(0, "next call"), (2, "close")])
def test_a_failure_of_one_rank_reaches_all_once(job: Job, failing: int, then: str) -> None:
    def work(context: CheckpointContext, rank: int) -> tuple[str, str]:
        disk = FaultyDisk("the disk", 0)
        if rank == failing:
            context._store = DirectoryStore(job.store, disk=disk)
        with context.store_path(STEPS, shard=True, blocking=False) as (path, failed):
            (path / str(rank)).write_text("x")
            disk.at = disk.calls + 5
        with pytest.raises(StorageError, match=f"{failed} was not saved") as caught:
            if then == "close":
                context.close()
            else:
                with context.store_path(STEPS, shard=True):
                    raise AssertionError("the block was entered")
        assert (f"rank {failing}: " in str(caught.value)) == (rank != failing)
        if then == "close":
            return failed, ""
        with context.store_path(STEPS, shard=True) as (path, good):
            (path / str(rank)).write_text("x")
        return failed, good

    ((failed, good),) = set(job.run(3, work))
    assert failed != good
    assert job.registered == listed(job.store) == ([good] if good else [])
    nothing_is_left_over(job.store, restart=0)


def test_a_call_of_one_rank_fails_for_every_n(job: Job, tmp_path: Path) -> None:
    """Whatever fails in a sharded background save, all ranks raise, and nothing is left."""
    for at in range(1, 400):
        disk = FaultyDisk("the disk", at)
        sources = [fill(tmp_path / str(at) / f"s{rank}", {f"{rank}/f": b"x", "same": b"s"}) for rank in range(2)]
        job.recorders = [Recorder() for _ in range(2)]

        def work(context: CheckpointContext, rank: int, at: int = at, disk: FaultyDisk = disk) -> None:
            if rank == at % 2:
                context._store = DirectoryStore(job.store, disk=disk, visibility_timeout=1.0)
            context.upload(tmp_path / str(at) / f"s{rank}", STEPS, shard=True, blocking=False)

        errors = job.errors(2, work)
        assert (errors[0] is None) == (errors[1] is None), errors
        assert all(isinstance(e, StorageError) for e in errors if e), errors
        assert [tree(source) for source in sources] == [{f"{rank}/f": b"x", "same": b"s"} for rank in range(2)]
        assert len(listed(job.store)) == len(job.registered)
        nothing_is_left_over(job.store)
        for storage_id in listed(job.store):
            DirectoryStore(job.store).delete(storage_id)
        if not disk.struck and at > 60:
            return
    raise AssertionError("it never gets through")


def test_futures_complete_at_different_times(job: Job) -> None:
    """Each rank commits from another thread, while the ranks talk; the order is that in which they were begun."""

    def work(context: CheckpointContext, rank: int) -> list[str]:
        ids = []
        for i in range(4):
            handle = context.begin({"steps_completed": i}, shard=True)
            (handle.path / str(rank)).write_text(f"{i}")
            thread = threading.Thread(target=handle.commit, kwargs={"blocking": (i + rank) % 2 == 0})
            thread.start()
            for _ in range(10):
                context._distributed.allgather(rank)
            thread.join()
            ids.append(handle.storage_id)
        return ids

    (ids,) = {tuple(found) for found in job.run(4, work)}
    assert job.registered == [*ids] == listed(job.store)


def test_one_that_a_rank_has_not_ended_is_busy_on_all(job: Job) -> None:
    def work(context: CheckpointContext, rank: int) -> str:
        first = context.begin({"steps_completed": 1}, shard=True)
        (first.path / str(rank)).write_text("x")
        if rank == 0:
            first.commit(blocking=False)
        with pytest.raises(CheckpointBusy, match=f"{first.storage_id} was begun"):
            context.begin({"steps_completed": 2}, shard=True)
        if rank:
            first.commit(blocking=False)
        context.begin(STEPS, shard=True).abort()
        return first.storage_id

    (first,) = set(job.run(3, work))
    assert job.registered == [first]


def test_it_is_refused_on_all_ranks_or_on_none(job: Job) -> None:
    slow = threading.Event()

    def work(context: CheckpointContext, rank: int) -> str:
        if rank == 0:
            context._observer.on_committed = lambda record: slow.wait()  # type: ignore[assignment,method-assign,return-value]
        with context.store_path(STEPS, shard=True, blocking=False) as (path, storage_id):
            (path / str(rank)).write_text("x")
        with pytest.raises(CheckpointBusy, match=storage_id):
            context.begin(STEPS, shard=True, if_busy="raise" if rank == 1 else "wait")
        slow.set()
        context.begin(STEPS, shard=True).abort()
        return storage_id

    (storage_id,) = set(job.run(3, work))
    assert listed(job.store) == [storage_id]


@pytest.mark.parametrize("giving_up", [0, 1])
def test_a_rank_that_aborts_fails_the_others(job: Job, giving_up: int) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        handle = context.begin(STEPS, shard=True)
        (handle.path / str(rank)).write_text("x")
        if rank == giving_up:
            handle.abort(ArithmeticError("the writer failed"))
        else:
            handle.commit(blocking=False)
            with pytest.raises(CheckpointError, match=f"rank {giving_up}: ArithmeticError: the writer failed"):
                handle.wait()

    job.run(3, work)
    nothing_is_left_over(job.store, restart=0)


def test_a_rank_that_closes_without_committing_fails_the_others(job: Job) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        handle = context.begin(STEPS, shard=True)
        if rank == 0:
            handle.commit(blocking=False)

    errors = job.errors(2, work)
    assert isinstance(errors[0], PeerLost) and "rank 1" in str(errors[0])
    assert errors[1] is None
    nothing_is_left_over(job.store, restart=0)


SAVE = """
import os, sys, time
from pathlib import Path
from det_core import core
from det_core.errors import DetCoreError
from support.checkpoints import Recorder, fill
from det_core.storage import Disk

class Slow(Disk):
    def do(self, operation, path, function, *args):
        if operation == "sync":
            time.sleep(float(sys.argv[2]))
        return super().do(operation, path, function, *args)

with core.DistributedContext.from_torch_distributed() as distributed:
    rank = distributed.rank
    context = Recorder().context(distributed, Path(sys.argv[1]), disk=Slow("slow"))
    try:
        for step in range(3):
            files = {f"of{rank}/{i}": b"%d" % step * 1000 for i in range(40)}
            with context.store_path({"steps_completed": step}, shard=True, blocking=False) as (path, storage_id):
                fill(path, files)
            print("saving", flush=True)
            print(sum(distributed.allgather(rank)), flush=True)
        context.close()
        print("closed", flush=True)
    except DetCoreError as e:
        print(type(e).__name__, e, flush=True)
"""


def test_real_ranks(tmp_path: Path) -> None:
    store, size = tmp_path / "store", 3
    with running(SAVE, size, tmp_path, env={"PYTHONPATH": TESTS}, args=(str(store), "0")) as ranks:
        assert ranks.wait() == [0] * size
        assert all("closed" in ranks.output(rank) for rank in range(size)), ranks.output(0)
    assert len(listed(store)) == 3
    for storage_id in listed(store):
        assert len(tree(store / storage_id)) == 40 * size + 1
    nothing_is_left_over(store, restart=0)


@pytest.mark.parametrize("killed", [0, 2])
def test_a_rank_that_is_killed_meanwhile_fails_the_others(killed: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running(SAVE, 3, tmp_path, env={"PYTHONPATH": TESTS}, args=(str(store), "0.1")) as ranks:
        ranks.wait_for("saving")
        ranks.processes[killed].send_signal(signal.SIGKILL)
        others = [rank for rank in range(3) if rank != killed]
        ranks.wait_for("PeerLost", ranks=others)
        assert [status for rank, status in enumerate(ranks.wait()) if rank != killed] == [0, 0]
        assert all(f"rank {killed}" in ranks.output(rank) for rank in others)
    assert len(listed(store)) <= 1
    nothing_is_left_over(store)
