"""Restoring from object stores: from a server of S3; from others in tests/stores."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.core._checkpoint import CheckpointCache, CheckpointContext, DownloadMode
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError, TensorboardError
from det_core.storage import open_store
from det_core.storage._drivers import Driver
from det_core.storage._object_store import ObjectStore
from support import scripts
from support.buckets import Around, FaultyDriver, closing, contents, put, through
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, tree
from support.servers import S3Server
from support.threads import as_ranks

NO = DownloadMode.NoSharedDownload
LARGE = os.urandom(1 << 20) * 40


class Counting(Around):
    """Remembers how many bytes came of each object."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.came: dict[str, int] = {}
        self._lock = threading.Lock()

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        found = call(*args)
        if operation == "read":
            with self._lock:
                self.came[key] = self.came.get(key, 0) + len(found)
        return found


class ReadOnly(Around):
    """Lets nobody write, as with a key that may only read."""

    def attempt(self, operation: str, key: str, call: Callable[..., Any], *args: Any) -> Any:
        if operation in ("read", "list"):
            return call(*args)
        raise PermissionError("Access Denied")


class Job:
    """A job's store and context, on a machine whose cache is ``folder/cache``."""

    def __init__(self, storage: Any, folder: Path, distributed: core.DistributedContext) -> None:
        opened = open_store(storage, folder, scratch=folder / "scratch")
        assert isinstance(opened, ObjectStore)
        self.driver = Counting(opened.driver)
        self.store = through(opened, lambda _: self.driver)
        self.recorder = Recorder()
        cache = CheckpointCache(folder / "cache", 1 << 30)
        self.context: CheckpointContext = self.recorder.context(distributed, folder, store=self.store, cache=cache)

    def came(self, storage_id: str) -> dict[str, int]:
        """Bytes by file, but for the manifest's."""
        found = {
            key.removeprefix(f"{storage_id}/"): n for key, n in self.driver.came.items() if key.startswith(storage_id)
        }
        return {name: n for name, n in found.items() if not name.startswith(".det_core/")}


@pytest.fixture
def storage(moto_server: S3Server) -> Any:
    """``checkpoint_storage`` for a place of this test alone."""
    return moto_server.storage(moto_server.make_bucket(), "some/prefix")


@pytest.fixture
def job(storage: Any, tmp_path: Path) -> Iterator[Callable[[core.DistributedContext], Job]]:
    """Starts a job on this test's store."""
    with closing() as opened:

        def start(distributed: core.DistributedContext) -> Job:
            made = Job(storage, tmp_path, distributed)
            opened(made.store)
            return made

        yield start


Start = Callable[[core.DistributedContext], Job]


def test_it_is_fetched_once_and_found_again(job: Start, tmp_path: Path) -> None:
    files = {**FILES, "a name/with ünicode": b"u" * 70_000, ".hidden": b"h"}
    with alone() as distributed:
        writer = job(distributed)
        storage_id = writer.context.upload(fill(tmp_path / "source", files), STEPS)
        first, second = job(distributed), job(distributed)
        with first.context.restore_path(storage_id) as path:
            found = tree(path)
            assert {name: found[name] for name in files} == files
            assert first.came(storage_id) == {name: len(data) for name, data in found.items() if data}
            assert second.store.in_use() == {storage_id}
        assert second.store.in_use() == set()
        with second.context.restore_path(storage_id) as path:
            assert tree(path) == found
        assert second.came(storage_id) == {}
        second.context.download(storage_id, tmp_path / "out")
        assert tree(tmp_path / "out") == found
        assert second.recorder.restored == [(storage_id, 3)]
        second.context.delete(storage_id)
        with pytest.raises(CheckpointNotFound), first.context.restore_path(storage_id):
            pass


def test_ranks_fetch_each_byte_once(job: Start, tmp_path: Path) -> None:
    files = {**{f"f{i}": bytes([i]) * 9000 for i in range(12)}, "large": LARGE}
    with alone() as distributed:
        storage_id = job(distributed).context.upload(fill(tmp_path / "source", files), STEPS)

    def work(distributed: core.DistributedContext) -> dict[str, int]:
        here = job(distributed)
        with here.context.restore_path(storage_id) as path:
            assert {name: data for name, data in tree(path).items() if name in files} == files
        return here.came(storage_id)

    came = as_ranks(3, work)
    assert sorted(name for found in came for name in found) == sorted([*files, "metadata.json"])
    assert all({**files, "metadata.json": b"x" * 26}[name] for found in came for name in found)
    assert sum(sum(found.values()) for found in came) == sum(map(len, files.values())) + 26


def test_a_flipped_byte(job: Start, tmp_path: Path) -> None:
    """In the copy: fetched again. In the store: an error that names the file and the store."""
    with alone() as distributed:
        here = job(distributed)
        storage_id = here.context.upload(fill(tmp_path / "source"), STEPS)
        with here.context.restore_path(storage_id) as path:
            whole = tree(path)
        (path / "model.pt").write_bytes(flipped(whole["model.pt"]))
        here.driver.came.clear()
        with here.context.restore_path(storage_id) as path:
            assert tree(path) == whole
        assert set(here.came(storage_id)) == {"model.pt"}

        key = f"{storage_id}/model.pt"
        put(here.store, key, flipped(whole["model.pt"]))
        with here.context.restore_path(storage_id):
            pass
        with pytest.raises(CheckpointCorrupt, match=r"model.pt") as caught:
            here.context.download(storage_id, tmp_path / "out", NO)
        assert here.store.root in str(caught.value) and not (tmp_path / "out").exists()
        with pytest.raises(CheckpointCorrupt, match=r"model.pt"), here.context.restore_path(storage_id, NO):
            pass


def test_what_others_wrote(job: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with alone() as distributed:
        here = job(distributed)
        for name, data in {"model": b"m", "sub/x": b"", "metadata.json": b"{}"}.items():
            put(here.store, f"theirs/{name}", data)
        with here.context.restore_path("theirs") as path:
            assert tree(path) == {"model": b"m", "sub/x": b"", "metadata.json": b"{}"}
        assert "unverified" in caplog.text
        assert [p.name for p in (tmp_path / "cache").iterdir()] == ["locks"]
        assert here.recorder.restored == [("theirs", None)]


def test_a_whole_run(storage: Any, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From core.init() on: checkpoints, event files beside them, and a resume by way of the cache."""
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("DET_CORE_CACHE", str(tmp_path / "cached"))
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
    with core.init(
        name="x", checkpoint_storage=storage, resume="latest", tensorboard_mode=core.TensorboardMode.MANUAL
    ) as ctx:
        assert ctx.latest_checkpoint == storage_id
        with ctx.checkpoint.restore_path(storage_id) as path:
            assert (path / "state").read_text() == "s"
            assert path.is_relative_to(tmp_path / "cached")
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
        here = Job(storage, tmp_path, distributed)
        opened(here.store)
        storage_id = here.context.upload(fill(tmp_path / "source", files), STEPS)
        struck, raised = set(), 0
        for at in range(1, 100):
            work = tmp_path / str(at)
            driver = FaultyDriver(here.store.driver, at, how)
            store = through(here.store, lambda _, driver=driver: driver)  # type: ignore[misc]
            cache = CheckpointCache(work / "cache", 1 << 30)
            context = Recorder().context(distributed, work, store=store, cache=cache)
            try:
                if call == "download":
                    context.download(storage_id, work / "out")
                else:
                    with context.restore_path(storage_id) as path:
                        assert {name: data for name, data in tree(path).items() if name in files} == files
            except StorageError as e:
                raised += 1
                assert here.store.root in str(e) and "cannot " in str(e) and storage_id in str(e)
                assert not (work / "out").exists() and list(work.glob(".det_core-tmp*")) == []
            else:
                assert call != "download" or len(tree(work / "out")) == 4
            here.context = Recorder().context(distributed, work, store=here.store, cache=cache)
            with here.context.restore_path(storage_id) as path:
                assert {name: data for name, data in tree(path).items() if name in files} == files
            struck.add(driver.struck)
            if not driver.struck:
                break
        assert struck == {"", "list", "read", "write", "delete"}
        assert raised


KILLED = """
import json, os, signal, sys, threading, time
from pathlib import Path
from support.checkpoints import alone
from fast.core.test_checkpoint_cache_stores import Counting, Job

turn, attempt = threading.Lock(), Counting.attempt

def is_there_a_whole_one():
    found = [path.stat() for path in Path(sys.argv[2]).glob("cache/*/aside-*/f*")]
    return any(one.st_blocks * 512 >= one.st_size for one in found)

def dying(self, operation, key, call, *args):
    with turn:
        if sum(self.came.values()) > 36 << 20:
            while not is_there_a_whole_one():  # what came is written by others
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(self, operation, key, call, *args)

Counting.attempt = dying
with alone() as distributed:
    job = Job(json.loads(sys.argv[1]), Path(sys.argv[2]), distributed)
    with job.context.restore_path(sys.argv[3]):
        print("not killed")
"""


def test_a_fetch_that_was_killed_is_finished(tmp_path: Path, moto_server: S3Server) -> None:
    """What it has whole is not fetched again; a file that only has its size yet is."""
    files = {f"f{i}": LARGE[: 12 << 20] + bytes([i]) for i in range(4)}
    storage = moto_server.storage(moto_server.make_bucket())
    with closing() as opened, alone() as distributed:
        here = Job(storage, tmp_path, distributed)
        opened(here.store)
        storage_id = here.context.upload(fill(tmp_path / "source", files), STEPS)
        done = scripts.run(KILLED, tmp_path, json.dumps(storage), tmp_path, storage_id)
        assert done.returncode == -signal.SIGKILL, done.stdout
        left = {path.name: path.stat().st_size for path in tmp_path.glob("cache/*/aside-*/f*")}
        assert left == {name: len(data) for name, data in files.items()}, "room is taken for all of them at once"
        with here.context.restore_path(storage_id) as path:
            assert {name: data for name, data in tree(path).items() if name in files} == files
        came = here.came(storage_id)
        assert 0 < len(set(files) & set(came)) < 4


def test_a_key_that_may_only_read_can_restore(tmp_path: Path, moto_server: S3Server) -> None:
    storage = moto_server.storage(moto_server.make_bucket())
    with closing() as opened, alone() as distributed:
        here = Job(storage, tmp_path, distributed)
        opened(here.store)
        storage_id = here.context.upload(fill(tmp_path / "source"), STEPS)
        store = through(here.store, ReadOnly)
        cache = CheckpointCache(tmp_path / "cache", 1 << 30)
        context = Recorder().context(distributed, tmp_path, store=store, cache=cache)
        with context.restore_path(storage_id) as path, context.restore_path(storage_id, NO) as other:
            assert tree(path) == tree(other)
        context.download(storage_id, tmp_path / "out")
        assert tree(tmp_path / "out") == tree(path)
        assert context.get_metadata(storage_id) == STEPS
        with pytest.raises(StorageError, match="cannot "), context.store_path(STEPS) as (path, _):
            (path / "x").write_text("x")


def flipped(data: bytes) -> bytes:
    """With another bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
