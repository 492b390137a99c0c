"""Checkpoints that several ranks write together: conflicts, failures of one rank, and errors of the others."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointConflict, CheckpointError, CollectiveMismatch, StorageError
from det_core.storage import DirectoryStore
from support.checkpoints import FILES, STEPS, Recorder, fill, listed, nothing_is_left_over, tree
from support.disks import FaultyDisk
from support.threads import as_ranks


class Job:
    """Ranks as threads, each with a checkpoint context on one store."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.recorders: dict[int, Recorder] = {}

    def run(self, size: int, work: Callable[[CheckpointContext, int], Any]) -> list[Any]:
        """Return the results by rank."""
        return as_ranks(size, lambda distributed: self._rank(distributed, work))

    def errors(self, size: int, work: Callable[[CheckpointContext, int], Any]) -> list[BaseException]:
        """Return the error of each rank; fail if one has none."""

        def catch(context: CheckpointContext, rank: int) -> BaseException:
            try:
                work(context, rank)
            except BaseException as e:
                return e
            raise AssertionError(f"rank {rank} raised nothing")

        return self.run(size, catch)

    def _rank(self, distributed: core.DistributedContext, work: Callable[[CheckpointContext, int], Any]) -> Any:
        recorder = self.recorders.setdefault(distributed.rank, Recorder())
        context = recorder.context(distributed, self.store)
        try:
            return work(context, distributed.rank)
        finally:
            context.close()

    @property
    def registered(self) -> list[Any]:
        """Registered checkpoints; only the chief registers."""
        assert not any(recorder.registered for rank, recorder in self.recorders.items() if rank)
        return self.recorders[0].registered

    def nothing_kept(self) -> None:
        """No checkpoint is listed or registered, and no byte is left."""
        assert self.registered == []
        assert not self.store.exists() or [p.name for p in self.store.iterdir()] in ([], [".det_core-tmp"])
        nothing_is_left_over(self.store, restart=0)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_upload_is_the_union_of_the_folders(job: Job, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> str:
        if rank == 1:
            return context.upload(None, shard=True)
        source = fill(tmp_path / f"source{rank}", {f"rank{rank}": b"%d" % rank, f"sub/of{rank}": b"x", "same": b"same"})
        return context.upload(source, {"steps_completed": 3, "by": {str(rank): rank}}, shard=True)

    (storage_id,) = set(job.run(3, work))
    files = {"rank0": b"0", "rank2": b"2", "sub/of0": b"x", "sub/of2": b"x", "same": b"same"}
    found = tree(job.store / storage_id)
    found.pop("metadata.json")
    assert found == files
    (record,) = job.registered
    assert record["metadata"] == {"steps_completed": 3, "by": {"0": 0, "2": 2}}
    size = os.path.getsize(job.store / storage_id / "metadata.json")
    assert record["resources"] == {**{p: len(d) for p, d in files.items()}, "sub/": 0, "metadata.json": size}
    assert listed(job.store) == [storage_id]
    nothing_is_left_over(job.store, restart=0)


def test_ranks_with_one_folder_upload_it_once(job: Job, tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    (storage_id,) = set(job.run(3, lambda context, rank: context.upload(source, STEPS, shard=True)))
    found = tree(job.store / storage_id)
    found.pop("metadata.json")
    assert found == FILES


def test_selectors_of_ranks_with_one_folder_add_up(job: Job, tmp_path: Path) -> None:
    source = fill(tmp_path / "source")

    def work(context: CheckpointContext, rank: int) -> str:
        wanted = [("model.pt", "rng"), ("rng", "sub/deep/")][rank]
        return context.upload(source, STEPS, shard=True, selector=lambda path: path in wanted)

    (storage_id,) = set(job.run(2, work))
    assert set(tree(job.store / storage_id)) == {"model.pt", "rng", "metadata.json"}
    assert set(job.registered[0]["resources"]) == {"model.pt", "rng", "metadata.json", "sub/", "sub/deep/"}


@pytest.mark.parametrize("call", ["upload", "store_path"])
def test_files_that_differ_are_a_conflict_on_every_rank(job: Job, call: str, tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = [
        {"same": b"s", "size": b"1", "bytes": b"a", "kind": b"file", "mine0": b""},
        {"same": b"s", "size": b"12", "bytes": b"a", "kind/x": b"", "mine1": b""},
        {"same": b"s", "bytes": b"b", "mine2": b""},
    ]

    def work(context: CheckpointContext, rank: int) -> None:
        if call == "upload":
            context.upload(fill(tmp_path / f"source{rank}", files[rank]), STEPS, shard=True)
        else:
            with context.store_path(STEPS, shard=True) as (path, _):
                fill(path, files[rank])

    errors = job.errors(3, work)
    assert {type(e) for e in errors} == {CheckpointConflict}
    for error in errors:
        assert "size (ranks 0, 1)" in str(error)
        assert "kind (a file on rank 0, a folder on rank 1)" in str(error)
        assert "same" not in str(error) and "mine" not in str(error)
    job.nothing_kept()


@pytest.mark.parametrize("call", ["upload", "store_path"])
def test_bytes_that_differ_at_one_size_are_a_conflict(job: Job, call: str, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        files = {"model": b"a" * 100 + b"%d" % (rank // 2), "same": b"s"}
        if call == "upload":
            context.upload(fill(tmp_path / f"source{rank}", files), STEPS, shard=True)
        else:
            with context.store_path(STEPS, shard=True) as (path, _):
                fill(path, files)

    for error in job.errors(3, work):
        assert isinstance(error, CheckpointConflict)
        assert "model (ranks 0, 1, 2)" in str(error)
    job.nothing_kept()


@pytest.mark.parametrize("call", ["upload", "store_path"])
def test_metadata_that_differs_is_a_conflict_before_anything_is_written(job: Job, call: str, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {"steps_completed": 1, "a": {"b": 1, "c": 1}, "l": [1], "one": True, "kind": {"x": 1}},
        {"steps_completed": 1, "a": {"b": 2, "d": 1}, "l": [2], "one": 1, "kind": 1},
    ]

    def work(context: CheckpointContext, rank: int) -> None:
        if call == "upload":
            context.upload(fill(tmp_path / f"source{rank}"), given[rank], shard=True)
        else:
            with context.store_path(given[rank], shard=True):
                raise AssertionError("the block was entered")

    for error in job.errors(2, work):
        assert isinstance(error, CheckpointConflict)
        for key in ("/a/b (ranks 0, 1)", "/l (ranks 0, 1)", "/one (ranks 0, 1)", "/kind (ranks 0, 1)"):
            assert key in str(error)
        assert "/a/c" not in str(error) and "steps" not in str(error)
    assert not job.store.exists()


def test_metadata_may_come_from_any_rank(job: Job) -> None:
    def work(context: CheckpointContext, rank: int) -> str:
        with context.store_path({"steps_completed": 4} if rank == 1 else None, shard=True) as (path, storage_id):
            (path / str(rank)).write_text("x")
        return storage_id

    (storage_id,) = set(job.run(2, work))
    assert job.registered[0]["steps_completed"] == 4
    assert listed(job.store) == [storage_id]


@pytest.mark.parametrize("shard", [False, True])
def test_keys_added_in_the_block_count(job: Job, shard: bool) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        metadata: dict[str, Any] = {"steps_completed": 4}
        if shard or rank == 0:
            with context.store_path(metadata, shard=shard) as (path, _):
                metadata[f"rank{rank}"] = path.name != ""

    job.run(2, work)
    expected = {"steps_completed": 4, "rank0": True} | ({"rank1": True} if shard else {})
    assert job.registered[0]["metadata"] == expected


def test_a_rank_that_leaves_out_steps_completed_everywhere_is_told(job: Job) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        with context.store_path({"epoch": 1}, shard=True):
            raise AssertionError("the block was entered")

    for error in job.errors(2, work):
        assert isinstance(error, ValueError)
        assert "steps_completed" in str(error)
    assert not job.store.exists()


@pytest.mark.parametrize("call", ["upload", "store_path", "begin"])
def test_only_the_chief_may_without_shard(job: Job, call: str, tmp_path: Path) -> None:
    source = fill(tmp_path / "source")

    def work(context: CheckpointContext, rank: int) -> None:
        if rank == 0:
            return
        with pytest.raises(RuntimeError, match=rf"checkpoint\.{call}\(shard=False\) was called on rank 1.*shard=True"):
            if call == "upload":
                context.upload(source, STEPS)
            elif call == "begin":
                context.begin(STEPS)
            else:
                with context.store_path(STEPS):
                    pass

    job.run(2, work)
    assert not job.store.exists()


def test_it_is_registered_when_every_rank_is_safe(job: Job) -> None:
    """The chief waits for a slow rank, and tells of the checkpoint before any rank returns."""
    chief_is_done, late, told = threading.Event(), threading.Event(), threading.Event()

    def work(context: CheckpointContext, rank: int) -> None:
        if rank == 0:

            def registered(record: Any) -> None:
                assert late.is_set()
                assert set(record["resources"]) == {"0", "1", "metadata.json"}
                assert listed(job.store) == [record["storage_id"]]
                told.set()

            context._observer.on_committed = registered  # type: ignore[method-assign]
        with context.store_path(STEPS, shard=True) as (path, _):
            (path / str(rank)).write_text("x")
            if rank == 1:
                assert chief_is_done.wait()
                late.set()
            else:
                chief_is_done.set()
        assert told.is_set()

    job.run(2, work)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_block_that_raises_on_one_rank_fails_on_all(job: Job, failing: int) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        with context.store_path(STEPS, shard=True) as (path, _):
            (path / str(rank)).write_text("x")
            if rank == failing:
                raise ArithmeticError("the model is on fire")

    errors = job.errors(3, work)
    for rank, error in enumerate(errors):
        if rank == failing:
            assert isinstance(error, ArithmeticError)
        else:
            assert type(error) is CheckpointError
            assert f"rank {failing}: ArithmeticError: the model is on fire" in str(error)
    job.nothing_kept()


def test_several_ranks_that_fail_are_all_named(job: Job) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        with context.store_path(STEPS, shard=True):
            if rank:
                raise ArithmeticError(f"of {rank}")

    error = job.errors(3, work)[0]
    assert "rank 1: ArithmeticError: of 1; rank 2: ArithmeticError: of 2" in str(error)


def test_a_disk_that_fails_on_one_rank_fails_all(job: Job) -> None:
    """Each call of one rank's disk fails once; those of uploads: in test_checkpoint_background_ranks."""
    through: set[int] = set()
    for at, failing in itertools.product(range(1, 400), range(2)):
        disk = FaultyDisk("the disk", at)
        errors: list[BaseException | None] = [None, None]

        def work(context: CheckpointContext, rank: int, failing: int = failing, disk: FaultyDisk = disk) -> None:
            if rank == failing:
                context._store = DirectoryStore(job.store, disk=disk, visibility_timeout=1.0)
            try:
                with context.store_path(STEPS, shard=True) as (path, _):
                    fill(path, {f"{rank}/f": b"x"})
            except BaseException as e:
                errors[rank] = e  # noqa: B023

        job.recorders.clear()
        job.run(2, work)
        if not disk.struck:
            assert errors == [None, None]
            if through == {1 - failing}:
                return
            through.add(failing)
        if errors[0] is None:
            assert errors[1] is None, "one rank raised and the other did not"
            assert len(job.registered) == 1
        else:
            assert all(isinstance(e, StorageError) for e in errors), errors
            assert f"rank {failing}: " in str(errors[1 - failing])
            assert job.registered == []
        assert len(listed(job.store)) == len(job.registered)
        nothing_is_left_over(job.store)
        for storage_id in listed(job.store):
            DirectoryStore(job.store).delete(storage_id)
    raise AssertionError("it never gets through")


def test_a_bad_argument_on_one_rank_is_told_to_all(job: Job, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        context.upload(tmp_path / "nothing" if rank == 1 else fill(tmp_path / "s"), STEPS, shard=True)

    errors = job.errors(2, work)
    assert all(isinstance(e, ValueError) for e in errors)
    assert "rank 1: " in str(errors[0]) and "nothing is not a folder" in str(errors[0])
    assert not job.store.exists()


def test_a_rank_that_does_not_see_the_store_is_named(job: Job, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        if rank == 1:
            context._store = DirectoryStore(tmp_path / "another disk", visibility_timeout=0.1)
        with context.store_path(STEPS, shard=True):
            raise AssertionError("the block was entered")

    errors = job.errors(2, work)
    assert all(isinstance(e, StorageError) for e in errors)
    assert "rank 1: " in str(errors[0]) and "every rank has mounted" in str(errors[0])
    job.nothing_kept()


def test_ranks_that_call_different_things_are_told(job: Job, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        if rank == 0:
            context.upload(fill(tmp_path / "s"), STEPS, shard=True)
        else:
            with context.store_path(STEPS, shard=True):
                raise AssertionError("the block was entered")

    for error in job.errors(2, work):
        assert isinstance(error, CollectiveMismatch)
        assert "upload on rank 0" in str(error) and "store_path on rank 1" in str(error)
    assert not job.store.exists()


def test_invalid_hp_in_the_block_ends_the_other_ranks(job: Job) -> None:
    from det_core import InvalidHP

    def work(context: CheckpointContext, rank: int) -> None:
        with context.store_path(STEPS, shard=True):
            if rank == 1:
                raise InvalidHP("no")

    errors = job.errors(2, work)
    assert isinstance(errors[0], SystemExit) and errors[0].code == 0
    assert isinstance(errors[1], InvalidHP)
    job.nothing_kept()


def test_registration_that_fails_is_told_to_all(job: Job) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        def refuse(record: Any) -> None:
            raise ConnectionError("the master is gone")

        context._observer.on_committed = refuse  # type: ignore[method-assign]
        with context.store_path(STEPS, shard=True) as (path, _):
            (path / str(rank)).write_text("x")

    errors = job.errors(2, work)
    assert isinstance(errors[0], ConnectionError)
    assert "rank 0: ConnectionError: the master is gone" in str(errors[1])
    assert len(listed(job.store)) == 1
