"""Restoring what lies elsewhere: the ranks of a machine fetch it once, into folders that end with the block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.core._checkpoint import CheckpointContext, DownloadMode
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError, TensorboardError
from det_core.storage import open_store
from det_core.storage._object_store import ObjectStore
from support import scripts
from support.buckets import Around, FaultyDriver, closing, contents, put, through
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, listed, tree
from support.elsewhere import Elsewhere
from support.servers import S3Server
from support.threads import as_ranks

NO = DownloadMode.NoSharedDownload
MANY = {f"{'sub/' * (i % 3)}f{i}": b"%d" % (i % 10) * 3000 for i in range(20)}
EVERYTHING = sorted([*MANY, "metadata.json"])


def left(folder: Path) -> list[Path]:
    """Return the files in the scratch directory."""
    return [path for path in (folder / "scratch").rglob("*") if path.name != ".det_core-tmp"]


@pytest.fixture
def stored(tmp_path: Path) -> str:
    with alone() as distributed:
        return Recorder().context(distributed, tmp_path / "store").upload(fill(tmp_path / "source", MANY), STEPS)


def on_ranks(size: int, folder: Path, work: Callable[[CheckpointContext, int], Any]) -> tuple[list[Any], list[str]]:
    """Return the results or errors of each rank, and the files that all of them fetch."""
    stores = [Elsewhere(folder / "store") for _ in range(size)]

    def run(distributed: core.DistributedContext) -> Any:
        context = Recorder().context(distributed, folder / "store", store=stores[distributed.rank])
        try:
            return work(context, distributed.rank)
        except Exception as e:
            return e

    found = as_ranks(size, run)
    return found, sorted(name for store in stores for name in store.names)


@pytest.mark.parametrize(("size", "mode"), [(1, NO), (3, DownloadMode.LocalWorkersShareDownload)])
def test_a_machine_fetches_each_file_once(size: int, mode: DownloadMode, stored: str, tmp_path: Path) -> None:
    paths: list[Path] = []

    def work(context: CheckpointContext, rank: int) -> dict[str, bytes]:
        with context.restore_path(stored, mode) as path:
            paths.append(path)
            assert path.name == stored
            return tree(path)

    found, fetched = on_ranks(size, tmp_path, work)
    assert fetched == EVERYTHING
    assert all({name: one[name] for name in MANY} == MANY for one in found)
    assert len(set(paths)) == size and not any(path.exists() for path in paths)
    assert left(tmp_path) == []


def test_a_rank_that_leaves_its_block_takes_nothing_from_the_others(stored: str, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> dict[str, bytes]:
        with context.restore_path(stored) as path:
            if rank == 1:
                context._distributed.barrier()
                return tree(path)
        context._distributed.barrier()
        assert not path.exists()
        return {}

    found, _ = on_ranks(2, tmp_path, work)
    assert {name: found[1][name] for name in MANY} == MANY


def test_each_alone_fetches_for_itself(stored: str, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        if rank == 1:
            with context.restore_path(stored, NO) as path:
                assert len(tree(path)) == len(EVERYTHING)

    assert on_ranks(2, tmp_path, work) == ([None, None], EVERYTHING)


def test_what_any_rank_of_the_machine_selects_is_there_for_all(stored: str, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> set[str]:
        wanted = ["f0", "sub/f1", "nothing"][rank]
        with context.restore_path(stored, selector=lambda path: path == wanted) as path:
            return set(tree(path))

    assert on_ranks(3, tmp_path, work) == ([{"f0", "sub/f1"}] * 3, ["f0", "sub/f1"])


def test_folders_come_with_what_is_in_them_or_when_selected(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", {"a/b/c": b"c"})
    (source / "empty").mkdir()
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "store", store=Elsewhere(tmp_path / "store"))
        storage_id = context.upload(source, STEPS)
        for wanted, found in (("a/b/c", {"a", "a/b", "a/b/c"}), ("empty/", {"empty"})):
            with context.restore_path(storage_id, selector=lambda path, wanted=wanted: path == wanted) as path:  # type: ignore[misc]
                assert {p.relative_to(path).as_posix() for p in path.rglob("*")} == found


def test_it_is_held_while_it_is_fetched_and_told_of_once(stored: str, tmp_path: Path) -> None:
    store, recorder = Elsewhere(tmp_path / "store"), Recorder()
    held: list[set[str]] = []
    store.arriving = lambda _: held.append(store.in_use())
    with alone() as distributed:
        context = recorder.context(distributed, tmp_path / "store", store=store)
        for _ in range(2):
            with context.restore_path(stored):
                pass
        context.download(stored, tmp_path / "out")
    assert all(one == {stored} for one in held) and len(held) == 3 * len(EVERYTHING)
    assert store.in_use() == set()
    assert recorder.restores == [(stored, 3)]


def test_a_download_goes_straight_to_the_folder(stored: str, tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> None:
        context.download(stored, tmp_path / "out")

    assert on_ranks(3, tmp_path, work) == ([None] * 3, EVERYTHING)
    assert set(tree(tmp_path / "out")) == set(EVERYTHING)
    assert not (tmp_path / "scratch").exists()
    for path in (tmp_path / "out").rglob("f*"):
        path.write_bytes(b"may be changed")


@pytest.mark.parametrize("broken", [0, 1])
def test_what_fails_on_one_rank_fails_on_all(broken: int, stored: str, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise StorageError(5, f"cannot read {name}")

    def work(context: CheckpointContext, rank: int) -> None:
        if rank == broken:
            context._store.arriving = refuse  # type: ignore[attr-defined]
        with context.restore_path(stored):
            raise AssertionError("the block was entered")

    errors, _ = on_ranks(2, tmp_path, work)
    assert all(isinstance(e, StorageError) and "cannot read" in str(e) for e in errors), errors
    assert f"rank {broken}: " in str(errors[1 - broken])
    assert left(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from support.checkpoints import Recorder, alone
from support.elsewhere import Elsewhere

store = Elsewhere(Path(sys.argv[1]))
store.arriving = lambda _: len(store.fetched) > 5 and os.kill(os.getpid(), signal.SIGKILL)
with Recorder().context(alone(), Path(sys.argv[1]), store=store).restore_path(sys.argv[2]):
    print("not killed")
"""


def test_what_a_killed_fetch_left_is_removed_by_the_next(stored: str, tmp_path: Path) -> None:
    assert scripts.run(KILLED, tmp_path, tmp_path / "store", stored).returncode == -9
    assert len([path for path in left(tmp_path) if path.is_file()]) == 6
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "store", store=Elsewhere(tmp_path / "store"))
        with context.restore_path(stored) as path:
            assert len(tree(path)) == len(EVERYTHING)
    assert left(tmp_path) == []


# From a server of S3; from others in tests/stores.


class ReadOnly(Around):
    """Lets nobody write, as with a key that may only read."""

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        if operation in ("read", "list"):
            return call(*args)
        raise PermissionError("Access Denied")


@pytest.fixture
def storage(moto_server: S3Server) -> Any:
    """``checkpoint_storage`` for a place of this test alone."""
    return moto_server.storage(moto_server.make_bucket(), "some/prefix")


@pytest.fixture
def bucket(storage: Any, tmp_path: Path) -> Iterator[ObjectStore]:
    with closing() as opened:
        store = opened(open_store(storage, tmp_path, scratch=tmp_path / "own"))
        assert isinstance(store, ObjectStore)
        yield store


def test_a_bucket(bucket: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {**FILES, "a name/with ünicode": b"u" * 70_000, ".hidden": b"h"}
    for name, data in {"model": b"m", "sub/x": b"", "metadata.json": b"{}"}.items():
        put(bucket, f"theirs/{name}", data)
    with alone() as distributed:
        recorder = Recorder()
        context = recorder.context(distributed, tmp_path, store=bucket)
        storage_id = context.upload(fill(tmp_path / "source", files), STEPS)
        with context.restore_path(storage_id) as path:
            found = tree(path)
            assert {name: found[name] for name in files} == files
        context.download(storage_id, tmp_path / "out")
        assert tree(tmp_path / "out") == found
        with context.restore_path("theirs") as path:
            assert tree(path) == {"model": b"m", "sub/x": b"", "metadata.json": b"{}"}
        assert caplog.text.count("unverified") == 1
        assert recorder.restores == [(storage_id, 3), ("theirs", None)]
        damaged = bytearray(files["model.pt"])
        damaged[1000] ^= 1
        put(bucket, f"{storage_id}/model.pt", bytes(damaged))
        for call in (context.restore_path(storage_id), context.restore_path(storage_id, NO)):
            with pytest.raises(CheckpointCorrupt, match=r"model.pt") as caught, call:
                pass
            assert bucket.root in str(caught.value)
        context.delete(storage_id)
        with pytest.raises(CheckpointNotFound), context.restore_path(storage_id):
            pass


def test_a_key_that_may_only_read_can_restore(bucket: ObjectStore, tmp_path: Path) -> None:
    with alone() as distributed:
        storage_id = Recorder().context(distributed, tmp_path, store=bucket).upload(fill(tmp_path / "source"), STEPS)
        context = Recorder().context(distributed, tmp_path, store=through(bucket, ReadOnly))
        with context.restore_path(storage_id) as path, context.restore_path(storage_id, NO) as other:
            assert tree(path) == tree(other)
        assert context.get_metadata(storage_id) == STEPS
        with pytest.raises(StorageError, match="cannot "), context.store_path(STEPS) as (path, _):
            (path / "x").write_text("x")


def test_a_whole_run(storage: Any, tmp_path: Path, home: Path) -> None:
    """From core.init() on: checkpoints, event files beside them, and a resume."""
    pytest.importorskip("tensorboard")
    with core.init(name="x", checkpoint_storage=storage, tensorboard_mode=core.TensorboardMode.AUTO) as ctx:
        ctx.train.report_training_metrics(1, {"loss": 0.5})
        with ctx.checkpoint.store_path(STEPS) as (path, storage_id):
            (path / "state").write_text("s")
        run_id = ctx.run_id
        with closing() as opened:
            store = opened(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
            early = contents(store, f"tensorboard/{run_id}/")
            assert len(early) == 1, "event files are copied with each checkpoint"
            ctx.train.report_training_metrics(2, {"loss": 0.25})
            ctx.close()
            ((name, data),) = contents(store, f"tensorboard/{run_id}/").items()
            assert name in early and data.startswith(early[name]) and len(data) > len(early[name])
            assert [header.storage_id for header in store.list()] == [storage_id]
    manual = core.TensorboardMode.MANUAL
    with core.init(name="x", checkpoint_storage=storage, resume="latest", tensorboard_mode=manual) as ctx:
        assert ctx.latest_checkpoint == storage_id
        with ctx.checkpoint.resume() as path:
            assert path is not None and (path / "state").read_text() == "s" and path.is_relative_to(home)
        assert not path.exists()
        (ctx.train.get_tensorboard_path() / "mine").write_text("m")
        ctx.train.upload_tensorboard_files(lambda path: path.name == "mine", lambda path, rank: Path(f"{rank}-{path}"))
        with closing() as opened:
            store = opened(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
            assert contents(store, f"tensorboard/{run_id}/")[f"tensorboard/{run_id}/0-mine"] == b"m"


def test_event_files_that_cannot_be_copied_are_named(tmp_path: Path, moto_server: S3Server) -> None:
    name = moto_server.make_bucket()
    with core.init(checkpoint_storage=moto_server.storage(name), tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        (ctx.train.get_tensorboard_path() / "mine").write_text("m")
        with moto_server.client() as client:
            client.delete_bucket(Bucket=name)
        with pytest.raises(TensorboardError, match=rf"copying .*/mine to s3://{name}.*/mine: .*{name}"):
            ctx.train.upload_tensorboard_files()


@pytest.mark.parametrize(("call", "how"), [("restore_path", "EIO"), ("download", "dead")])
def test_whatever_request_fails_what_is_there_is_whole(
    call: str, how: str, tmp_path: Path, moto_server: S3Server
) -> None:
    """The N-th call of a driver fails, for every N: the error names it, and nothing is spoiled."""
    storage = moto_server.storage(moto_server.make_bucket())
    files = {"model": b"m" * 5000, "sub/x": b"x", "empty": b""}
    with closing() as opened, alone() as distributed:
        bucket = opened(open_store(storage, tmp_path, scratch=tmp_path / "own"))
        storage_id = Recorder().context(distributed, tmp_path, store=bucket).upload(fill(tmp_path / "f", files), STEPS)
        struck, raised = set(), 0
        for at in range(1, 100):
            work = tmp_path / str(at)
            driver = FaultyDriver(bucket.driver, at, how)
            store = through(bucket, lambda _, driver=driver: driver)  # type: ignore[misc]
            context = Recorder().context(distributed, work / "store", store=store)
            try:
                if call == "download":
                    context.download(storage_id, work / "out")
                else:
                    with context.restore_path(storage_id) as path:
                        assert {name: data for name, data in tree(path).items() if name in files} == files
            except StorageError as e:
                raised += 1
                assert bucket.root in str(e) and "cannot " in str(e) and storage_id in str(e)
                assert not (work / "out").exists() and list(work.glob(".det_core-tmp*")) == []
            else:
                assert call != "download" or len(tree(work / "out")) == 4
            assert not work.exists() or left(work) == []
            struck.add(driver.struck)
            if not driver.struck:
                break
        assert struck == {"", "list", "read", "write", "delete"}
        assert raised


def test_a_full_scratch_folder_is_named(stored: str, tmp_path: Path) -> None:
    from support.disks import small_disk

    with small_disk(tmp_path / "small", "64k") as disk, alone() as distributed:
        shutil.copytree(tmp_path / "store", tmp_path / "other" / "store")
        (disk / "filler").write_bytes(os.urandom(30_000))
        context = Recorder().context(distributed, disk / "store", store=Elsewhere(tmp_path / "store"))
        with pytest.raises(StorageError, match="No space left on device") as caught, context.restore_path(stored):
            pass
        assert str(disk / "scratch") in str(caught.value)
        assert listed(tmp_path / "store") == [stored]
