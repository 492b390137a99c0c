"""The cache when it is full, when jobs die in it, and when the disk fails under it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from det_core import core
from det_core._env import Environment
from det_core._errors import CheckpointError, DetCoreError, StorageError
from det_core.core._checkpoint import CheckpointCache
from det_core.storage import Disk
from support.checkpoints import STEPS, Recorder, alone, fill, tree
from support.disks import FaultyDisk
from support.elsewhere import Elsewhere
from support.ranks import running
from support.threads import as_ranks

TESTS = Path(__file__).parent.parent
FILES = {f"f{i}": os.urandom(100) * 100 for i in range(10)}
SIZE = 10 * 10_000 + len('{\n  "steps_completed": 3\n}')
T = TypeVar("T")


def store(folder: Path, *names: str) -> list[str]:
    """The ids of checkpoints of ``SIZE`` bytes each, all different."""
    found = []
    for name in names:
        files = {path: name.encode() * 10_000 for path in FILES} if len(name) == 1 else FILES
        with alone() as distributed:
            found.append(Recorder().context(distributed, folder / "store").upload(fill(folder / name, files), STEPS))
    return found


@contextmanager
def restored(folder: Path, storage_id: str, limit: int, disk: Disk | None = None) -> Iterator[tuple[Path, Elsewhere]]:
    """A checkpoint as a job of its own restores it."""
    elsewhere = Elsewhere(folder / "store")
    cache = CheckpointCache(folder / "cache", limit, disk)
    with alone() as distributed:
        context = Recorder().context(distributed, folder / "store", store=elsewhere, cache=cache)
        with context.restore_path(storage_id) as path:
            yield path, elsewhere


def kept(folder: Path) -> set[str]:
    """The ids of what the cache holds."""
    return {p.name for p in (folder / "cache").glob("[!.]*/*-*-*-*-*")}


def entries(folder: Path) -> list[Path]:
    return [p for p in (folder / "cache").glob("*") if p.name != "locks"]


class TestLimit:
    """What was used least recently goes first."""

    def test_the_oldest_use_goes(self, tmp_path: Path) -> None:
        a, b, c, d = store(tmp_path, *"abcd")
        limit = 3 * SIZE
        for storage_id in (a, b, c, a):
            with restored(tmp_path, storage_id, limit):
                time.sleep(0.01)
        assert kept(tmp_path) == {a, b, c}
        with restored(tmp_path, d, limit):
            assert kept(tmp_path) == {a, c, d}
        with restored(tmp_path, b, limit), restored(tmp_path, a, limit) as (_, elsewhere):
            assert elsewhere.fetched == []
        assert kept(tmp_path) == {a, b, d}

    def test_what_is_in_use_stays(self, tmp_path: Path) -> None:
        a, b, c = store(tmp_path, *"abc")
        with restored(tmp_path, a, SIZE) as (path, _), restored(tmp_path, b, SIZE) as (other, _):
            with restored(tmp_path, c, SIZE):
                assert kept(tmp_path) == {a, b, c}
            assert tree(path)["f0"] == b"a" * 10_000 and tree(other)["f0"] == b"b" * 10_000
            assert kept(tmp_path) == {a, b}
        assert kept(tmp_path) == {a}, "the one left last is the one used last"

    def test_nothing_stays_where_nothing_fits(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "a")
        for limit in (0, SIZE - 1):
            with restored(tmp_path, a, limit) as (path, _):
                assert len(tree(path)) == 11
            assert entries(tmp_path) == []

    def test_a_part_counts_as_what_is_there(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "a")
        cache = CheckpointCache(tmp_path / "cache", SIZE)
        with alone() as distributed:
            context = Recorder().context(
                distributed, tmp_path / "store", store=Elsewhere(tmp_path / "store"), cache=cache
            )
            for name, size in (("f1", 10_000), ("f2", 20_000), ("f1", 20_000)):
                with context.restore_path(a, selector=lambda path, name=name: path == name):  # type: ignore[misc]
                    (entry,) = entries(tmp_path)
                    assert json.loads((entry / "entry.json").read_text())["bytes"] == size

    def test_the_environment_says_where_and_how_much(self, tmp_path: Path) -> None:
        environment = Environment.read({"DET_CORE_HOME": "/home"})
        assert (environment.cache, environment.cache_bytes) == (None, 20 << 30)
        environment = Environment.read({"DET_CORE_CACHE": str(tmp_path), "DET_CORE_CACHE_BYTES": "0"})
        assert (environment.cache, environment.cache_bytes) == (tmp_path, 0)
        for wrong in ("-1", "20G", "1e9", "²"):
            with pytest.raises(ValueError, match=f"DET_CORE_CACHE_BYTES='{wrong}': expected a number of bytes"):
                Environment.read({"DET_CORE_CACHE_BYTES": wrong})


class StickyDisk(Disk):
    """One that removes nothing."""

    def do(self, operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
        if operation == "rename" and ".gone-" in path:
            raise self.error(operation, path, OSError(errno.EPERM, "Operation not permitted"))
        return super().do(operation, path, function, *args)


def test_a_copy_that_cannot_be_removed_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = store(tmp_path, "a", "b")
    with restored(tmp_path, a, SIZE):
        pass
    with restored(tmp_path, b, SIZE, StickyDisk("sticky")) as (path, _):
        assert len(tree(path)) == 11
    assert kept(tmp_path) == {a, b} and "cannot rename" in caplog.text


class SmallDisk(Disk):
    """One that has ``room`` bytes, less what lies in the cache already."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__("small")
        self.folder = folder
        self.room = room

    def do(self, operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
        found: Any = super().do(operation, path, function, *args)
        if function is os.statvfs:
            used = sum(p.stat().st_size for p in self.folder.rglob("f*") if p.is_file())
            fields = [1, 1, 0, 0, self.room - used, 0, 0, 0, 0, 0]
            return os.statvfs_result(fields)  # type: ignore[return-value]
        return found  # type: ignore[no-any-return]


class TestDiskFull:
    """There is no room."""

    def test_older_copies_make_room(self, tmp_path: Path) -> None:
        a, b = store(tmp_path, "a", "b")
        disk = SmallDisk(tmp_path / "cache", SIZE + 5000)
        for storage_id in (a, b):
            with restored(tmp_path, storage_id, 100 * SIZE, disk):
                assert kept(tmp_path) == {storage_id}

    def test_what_does_not_fit_is_one_clear_error(self, tmp_path: Path) -> None:
        a, b = store(tmp_path, "a", "b")
        disk = SmallDisk(tmp_path / "cache", SIZE + 5000)
        with restored(tmp_path, a, 100 * SIZE, disk):
            with pytest.raises(StorageError) as caught, restored(tmp_path, b, 100 * SIZE, disk):
                pass
            assert kept(tmp_path) == {a}
        assert caught.value.errno == errno.ENOSPC
        for text in (f"checkpoint {b} needs {SIZE} bytes", str(tmp_path / "cache"), "5026 are free", "DET_CORE_CACHE"):
            assert text in str(caught.value)

    def test_a_disk_that_fills_up_meanwhile(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "a")

        def work(distributed: core.DistributedContext) -> DetCoreError:
            elsewhere = Elsewhere(tmp_path / "store", disk=FaultyDisk("store"))
            context = Recorder().context(
                distributed, tmp_path / "store", store=elsewhere, cache=CheckpointCache(tmp_path / "cache", SIZE)
            )

            def full(name: str) -> None:
                raise StorageError(
                    errno.ENOSPC, f"checkpoint store s3://x: cannot write {name}: No space left on device"
                )

            if distributed.rank == 1:
                elsewhere.arriving = lambda name: full(name) if elsewhere.fetched else None
            with pytest.raises(StorageError) as caught, context.restore_path(a):
                pass
            return caught.value

        for error in as_ranks(2, work):
            assert error.errno == errno.ENOSPC  # type: ignore[attr-defined]
            assert f"in the cache {tmp_path / 'cache'}" in str(error) and "DET_CORE_CACHE" in str(error)
        assert list(tmp_path.glob("cache/*/aside-*/f*")) == [], "what came is removed, as the disk is full"
        with restored(tmp_path, a, SIZE) as (path, _):
            assert len(tree(path)) == 11


@contextmanager
def job(folder: Path, storage_id: str, *, limit: int = 1 << 30, pause: float = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that restores; it is killed at the end."""
    arguments = [str(folder / "store"), str(folder / "cache"), str(limit), storage_id, str(pause)]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.elsewhere", *arguments],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str], text: str) -> str:
    """The line of a process that begins with ``text``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            return line
    raise AssertionError(f"the process ended without {text!r}")


class TestJobs:
    """Jobs as processes of their own."""

    def test_they_share_one_fetch(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "many")
        with job(tmp_path, a, pause=0.05) as one, job(tmp_path, a) as two, job(tmp_path, a) as three:
            lines = [said(process, "files").split() for process in (one, two, three)]
        assert [line[1] for line in lines] == ["11"] * 3
        assert sorted(int(line[3]) for line in lines) == [0, 0, SIZE], "bytes are fetched once"

    def test_one_that_is_killed_while_it_fetches_is_followed(self, tmp_path: Path) -> None:
        """The next one waits while it lives, takes over what it has, and fetches the rest."""
        (a,) = store(tmp_path, "many")
        with job(tmp_path, a, pause=0.2) as one:
            said(one, "fetching")
            said(one, "fetching")
            with job(tmp_path, a) as two:
                time.sleep(0.5)
                one.send_signal(signal.SIGKILL)
                line = said(two, "files").split()
        assert line[1] == "11"
        assert 0 < int(line[3]) <= SIZE - 20_000, "what the dead one had fetched is not fetched again"
        (entry,) = entries(tmp_path)
        assert {p.name for p in entry.iterdir()} >= {a, "users", "entry.json"}
        assert list(entry.glob("aside-*")) == []
        with restored(tmp_path, a, SIZE) as (path, elsewhere):
            assert {name: tree(path)[name] for name in FILES} == FILES
            assert elsewhere.fetched == []

    def test_half_a_file_of_a_dead_one_is_not_believed(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "many")
        with job(tmp_path, a, pause=60) as one:
            said(one, "fetching")
            (aside,) = tmp_path.glob("cache/*/aside-*")
            one.kill()
            one.wait()
        came = {path.name for path in aside.iterdir()}
        assert len(came) == 1
        for name in came:
            (aside / name).write_bytes(bytes(os.path.getsize(aside / name)))  # as if it was only allocated
        (aside / "f5").write_bytes(FILES["f5"][:100])
        with restored(tmp_path, a, SIZE) as (path, elsewhere):
            assert {name: tree(path)[name] for name in FILES} == FILES
            assert len(elsewhere.fetched) == 11

    def test_one_that_is_killed_while_it_reads_is_not_waited_for(self, tmp_path: Path) -> None:
        a, b = store(tmp_path, "a", "b")
        with job(tmp_path, a) as one:
            said(one, "open")
            with restored(tmp_path, b, SIZE):
                assert kept(tmp_path) == {a, b}, "a living process reads it"
            one.send_signal(signal.SIGKILL)
            one.wait()
        with restored(tmp_path, b, SIZE):
            assert kept(tmp_path) == {b}

    def test_a_reader_keeps_its_files_when_others_fill_the_cache(self, tmp_path: Path) -> None:
        a, b = store(tmp_path, "a", "b")
        with job(tmp_path, a, limit=SIZE) as one:
            said(one, "open")
            with restored(tmp_path, b, SIZE):
                pass
            assert a in kept(tmp_path)
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
            said(one, "closed")
        assert kept(tmp_path) <= {a, b} and len(kept(tmp_path)) == 1

    def test_private_copies_of_the_dead_go(self, tmp_path: Path) -> None:
        fill(tmp_path / "store" / "theirs", FILES)
        (a,) = store(tmp_path, "a")
        with job(tmp_path, "theirs") as one:
            said(one, "open")
            (private,) = entries(tmp_path)
            with restored(tmp_path, a, 1 << 30):
                assert private in entries(tmp_path)
            one.send_signal(signal.SIGKILL)
            one.wait()
        assert private.exists()
        with restored(tmp_path, a, 1 << 30):
            assert not private.exists()


RANK = """
import os, sys, time
from pathlib import Path
from det_core import core
from det_core._errors import PeerLost
from det_core.core._checkpoint import CheckpointCache
from support.checkpoints import Recorder
from support.elsewhere import Elsewhere

root, cache, storage_id = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
with core.DistributedContext.detect() as distributed:
    store = Elsewhere(root)
    context = Recorder().context(distributed, root, store=store, cache=CheckpointCache(cache, 1 << 30))

    def arriving(name):
        if store.fetched:
            print("fetching", flush=True)
            time.sleep(60 if distributed.rank == 0 else 0.5)

    store.arriving = arriving
    try:
        with context.restore_path(storage_id):
            print("open", flush=True)
    except PeerLost as e:
        print("lost", e, flush=True)
"""


def test_ranks_whose_local_chief_is_killed_raise_and_others_go_on(tmp_path: Path) -> None:
    (a,) = store(tmp_path, "many")
    arguments = (str(tmp_path / "store"), str(tmp_path / "cache"), a)
    with running(RANK, 3, tmp_path, env={"PYTHONPATH": str(TESTS)}, args=arguments) as ranks:
        ranks.wait_for("fetching")
        ranks.processes[0].send_signal(signal.SIGKILL)
        with restored(tmp_path, a, 1 << 30) as (path, elsewhere):
            assert {name: tree(path)[name] for name in FILES} == FILES
            assert elsewhere.fetched != []
        assert ranks.wait(30)[1:] == [0, 0]
        for rank in (1, 2):
            assert "open" not in ranks.output(rank)
            assert "lost rank 0" in ranks.output(rank)
    with restored(tmp_path, a, 1 << 30) as (path, elsewhere):
        assert elsewhere.fetched == [] and {name: tree(path)[name] for name in FILES} == FILES


@pytest.mark.parametrize("how", ["EIO", "ENOSPC", "dead"])
def test_whatever_call_fails_the_next_job_finds_all(how: str, tmp_path: Path) -> None:
    """The N-th call to the cache's disk fails, for every N: an error that says so, or none; and nothing is spoiled."""
    a, b = store(tmp_path, "a", "b")
    with restored(tmp_path, b, SIZE):
        pass
    raised = 0
    for at in range(1, 1000):
        disk = FaultyDisk("the cache", at, how)
        try:
            with restored(tmp_path, a, SIZE, disk) as (path, _):
                assert tree(path)["f0"] == b"a" * 10_000 and len(tree(path)) == 11
        except CheckpointError as e:
            raised += 1
            assert isinstance(e, StorageError) and "checkpoint store the cache: cannot " in str(e)
            assert str(tmp_path / "cache") in str(e)
        with restored(tmp_path, b, SIZE) as (path, _):
            assert tree(path)["f0"] == b"b" * 10_000 and len(tree(path)) == 11
        assert kept(tmp_path) == {b}
        if not disk.struck:
            break
    assert raised > 20 and not disk.struck


def test_whatever_call_a_job_dies_at_the_next_one_finds_all(tmp_path: Path) -> None:
    a, b = store(tmp_path, "a", "b")
    with restored(tmp_path, b, SIZE):
        pass
    for at in range(1, 1000):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                with restored(tmp_path, a, SIZE, FaultyDisk("the cache", at, "exit")):
                    pass
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 77)
        for storage_id, content in ((a, b"a"), (b, b"b")):
            with restored(tmp_path, storage_id, SIZE) as (path, _):
                assert tree(path)["f0"] == content * 10_000 and len(tree(path)) == 11
        assert kept(tmp_path) == {b} and len(entries(tmp_path)) == 1
        if status == 0:
            return
    raise AssertionError("it died at every call")
