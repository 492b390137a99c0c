"""restore_path() of what lies elsewhere: fetched once per machine, compared on every use, kept within a limit."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.core._checkpoint import CheckpointCache, CheckpointContext, DownloadMode
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, DetCoreError, StorageError
from det_core.storage import DirectoryStore
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, tree
from support.elsewhere import Elsewhere
from support.processes import free_port, until
from support.threads import as_ranks

NO = DownloadMode.NoSharedDownload
MANY = {f"{'sub/' * (i % 3)}f{i}": b"%d" % (i % 10) * 3000 for i in range(20)}
AMPLE = 1 << 30


class Machine:
    """One machine's cache, and contexts that use it as jobs do."""

    def __init__(self, folder: Path, limit: int = AMPLE) -> None:
        self.folder = folder
        self.root = folder / "store"
        self.cache = CheckpointCache(folder / "cache", limit)
        self.recorder = Recorder()

    def store(self, name: str = "one", files: dict[str, bytes] = MANY) -> str:
        """Store a checkpoint; returns its id."""
        with alone() as distributed:
            return self.recorder.context(distributed, self.root).upload(fill(self.folder / name, files), STEPS)

    def job(
        self, distributed: core.DistributedContext, store: Elsewhere | None = None
    ) -> tuple[CheckpointContext, Elsewhere]:
        """A context, as one process has it, and its store."""
        store = store or Elsewhere(self.root)
        return self.recorder.context(distributed, self.root, store=store, cache=self.cache), store

    def restore(self, storage_id: str, *args: Any, **options: Any) -> tuple[dict[str, bytes], list[str]]:
        """What a job of its own finds, and what it fetches."""
        with alone() as distributed:
            context, store = self.job(distributed)
            with context.restore_path(storage_id, *args, **options) as path:
                return tree(path), store.names

    def entries(self) -> list[Path]:
        """The folders of the cache that hold a checkpoint."""
        found = [path for path in (self.folder / "cache").glob("*") if path.name != "locks"]
        assert not any(path.name.startswith(".gone") for path in found)
        return found

    def copy(self, storage_id: str) -> Path:
        """Where the files of a checkpoint are kept."""
        (path,) = (self.folder / "cache").glob(f"*/{storage_id}")
        return path

    def nobody_reads(self) -> None:
        """No user is left, nor anything under way."""
        for entry in self.entries():
            assert list((entry / "users").iterdir()) == []
            assert {p.name for p in entry.iterdir()} == {"users", "entry.json", next(entry.glob("*-*-*")).name}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_job_fetches_and_the_others_find_it(machine: Machine) -> None:
    storage_id = machine.store()
    everything = sorted([*MANY, "metadata.json"])
    found, fetched = machine.restore(storage_id)
    assert fetched == everything
    assert {name: found[name] for name in MANY} == MANY
    assert machine.restore(storage_id) == (found, [])
    shutil.rmtree(machine.copy(storage_id).parent)
    assert machine.restore(storage_id) == (found, everything)
    machine.nobody_reads()


def test_it_is_the_stored_checkpoint_that_decides(machine: Machine) -> None:
    storage_id = machine.store()
    machine.restore(storage_id)
    with alone() as distributed:
        context, _ = machine.job(distributed)
        DirectoryStore(machine.root).delete(storage_id, ["f0"])
        with context.restore_path(storage_id) as path:
            assert "f0" not in tree(path), "a file that was deleted from the stored checkpoint is not restored"
        context.delete(storage_id)
        with pytest.raises(CheckpointNotFound), context.restore_path(storage_id):
            pass


def test_restores_are_told_of_once(machine: Machine) -> None:
    storage_id = machine.store()
    with alone() as distributed:
        context, store = machine.job(distributed)
        for _ in range(2):
            with context.restore_path(storage_id):
                assert store.in_use() == {storage_id}
            assert store.in_use() == set()
    assert machine.recorder.restored == [(storage_id, 3)]


class TestDownload:
    """download() goes by way of the cache, where there is room, so that jobs share it as well."""

    def download(self, machine: Machine, storage_id: str, *args: Any) -> list[str]:
        """What a job of its own fetches to download."""
        target = machine.folder / f"out{len(list(machine.folder.glob('out*')))}"
        with alone() as distributed:
            context, store = machine.job(distributed)
            context.download(storage_id, target, *args)
            assert {name: data for name, data in tree(target).items() if name in MANY} == MANY
            assert store.in_use() == set()
            return store.names

    def test_it_is_fetched_once(self, machine: Machine) -> None:
        storage_id = machine.store()
        assert self.download(machine, storage_id) == sorted([*MANY, "metadata.json"])
        assert self.download(machine, storage_id) == []
        assert machine.restore(storage_id)[1] == []
        machine.nobody_reads()

    def test_what_is_downloaded_is_no_link_into_the_cache(self, machine: Machine) -> None:
        storage_id = machine.store()
        self.download(machine, storage_id)
        for path in (machine.folder / "out0").rglob("f*"):
            assert path.stat().st_nlink == 1
            path.write_bytes(b"changed in place")
        assert self.download(machine, storage_id) == []

    def test_jobs_at_a_time_share_one_fetch(self, machine: Machine) -> None:
        storage_id = machine.store()
        fetched: list[list[str]] = []
        jobs = []
        for number in range(3):

            def work(number: int = number) -> None:
                with alone() as distributed:
                    context, store = machine.job(distributed)
                    store.arriving = lambda _: time.sleep(0.01)
                    context.download(storage_id, machine.folder / f"job{number}")
                    fetched.append(store.names)

            jobs.append(threading.Thread(target=work))
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        assert sorted(fetched) == [[], [], sorted([*MANY, "metadata.json"])]
        for number in range(3):
            assert {n: d for n, d in tree(machine.folder / f"job{number}").items() if n in MANY} == MANY

    def test_one_process_alone_goes_around_it(self, machine: Machine) -> None:
        storage_id = machine.store()
        assert self.download(machine, storage_id, NO) == sorted([*MANY, "metadata.json"])
        assert not (machine.folder / "cache").exists()
        machine.restore(storage_id)
        assert self.download(machine, storage_id, NO) == sorted([*MANY, "metadata.json"])

    def test_what_is_larger_than_the_cache_goes_around_it(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, limit=1000)
        storage_id = machine.store()
        for _ in range(2):
            assert self.download(machine, storage_id) == sorted([*MANY, "metadata.json"])
        assert machine.entries() == []


class TestSelectors:
    """What is not selected is not fetched, and can be later."""

    def test_a_part_is_completed_later(self, machine: Machine) -> None:
        storage_id = machine.store()
        found, fetched = machine.restore(storage_id, selector=lambda path: path in ("f0", "sub/f1"))
        assert set(found) == {"f0", "sub/f1"} and fetched == ["f0", "sub/f1"]
        _, fetched = machine.restore(storage_id, selector=lambda path: path in ("sub/f1", "f3"))
        assert fetched == ["f3"]
        found, fetched = machine.restore(storage_id)
        assert set(found) == {*MANY, "metadata.json"}
        assert fetched == sorted({*MANY, "metadata.json"} - {"f0", "sub/f1", "f3"})

    def test_folders_come_with_what_is_in_them_or_when_selected(self, machine: Machine) -> None:
        with alone() as distributed:
            source = fill(machine.folder / "x", {"a/b/c": b"c"})
            (source / "empty").mkdir()
            storage_id = machine.recorder.context(distributed, machine.root).upload(source, STEPS)
        with alone() as distributed:
            context, _ = machine.job(distributed)
            with context.restore_path(storage_id, selector=lambda path: path == "a/b/c") as path:
                assert sorted(p.name for p in path.rglob("*")) == ["a", "b", "c"]
            with context.restore_path(storage_id, selector=lambda path: path == "empty/") as path:
                assert (path / "empty").is_dir()

    def test_ranks_get_what_any_of_them_selects(self, machine: Machine) -> None:
        storage_id = machine.store()
        wanted = ["f0", "sub/f1", "no such file"]
        store = Elsewhere(machine.root)

        def work(distributed: core.DistributedContext) -> set[str]:
            context, _ = machine.job(distributed, store)
            with context.restore_path(storage_id, selector=lambda path: path == wanted[distributed.rank]) as path:
                return set(tree(path))

        assert as_ranks(3, work) == [{"f0", "sub/f1"}] * 3
        assert store.names == ["f0", "sub/f1"]


class TestDamage:
    """A copy is never believed; the stored checkpoint is the truth."""

    @pytest.mark.parametrize(
        ("how", "job"),
        [
            ("flipped", "the same"), ("flipped", "another"), ("truncated", "the same"), ("missing", "another"),
            ("a link", "the same"), ("another file", "another"),
        ],
    )  # fmt: skip
    def test_a_damaged_copy_is_fetched_again(
        self, how: str, job: str, machine: Machine, caplog: pytest.LogCaptureFixture
    ) -> None:
        storage_id = machine.store()
        with alone() as distributed:
            context, store = machine.job(distributed)
            with context.restore_path(storage_id) as path:
                whole = tree(path)
            harm(path / "f3", how)
            if job == "another":
                context, store = machine.job(distributed)
            store.fetched.clear()
            with context.restore_path(storage_id) as path:
                assert tree(path) == whole
                assert not (path / "f3").is_symlink()
            assert store.names == ["f3"]
        assert ("f3 differs" in caplog.text) == (how != "missing")
        machine.nobody_reads()

    def test_what_the_disk_has_flipped_is_found_by_the_next_job(self, machine: Machine) -> None:
        """Without a new time of change; the job that has compared the file already trusts it."""
        storage_id = machine.store()
        whole, _ = machine.restore(storage_id)
        path = machine.copy(storage_id) / "f3"
        found = path.stat()
        flip(path)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert machine.restore(storage_id) == (whole, ["f3"])

    def test_a_damaged_stored_file_is_an_error_that_names_it(self, machine: Machine) -> None:
        storage_id = machine.store()
        flip(machine.root / storage_id / "f3")
        for _ in range(2):
            with pytest.raises(CheckpointCorrupt, match="f3"):
                machine.restore(storage_id)
        machine.restore(storage_id, selector=lambda path: path != "f3")
        with pytest.raises(CheckpointCorrupt, match="f3"):
            machine.restore(storage_id, NO)
        assert len(machine.entries()) == 1

    def test_a_copy_outlives_damage_of_the_store(self, machine: Machine) -> None:
        storage_id = machine.store()
        whole, _ = machine.restore(storage_id)
        flip(machine.root / storage_id / "f3")
        assert machine.restore(storage_id) == (whole, [])
        flip(machine.copy(storage_id) / "f3")
        with pytest.raises(CheckpointCorrupt, match="f3"):
            machine.restore(storage_id)

    def test_digests_are_compared_once_per_process(self, machine: Machine) -> None:
        storage_id = machine.store()
        machine.restore(storage_id)
        seen: list[int] = []
        with alone() as distributed:
            context = Recorder().context(
                distributed, machine.root, store=Elsewhere(machine.root), cache=machine.cache, progress=seen.append
            )
            total = sum(map(len, MANY.values())) + (machine.root / storage_id / "metadata.json").stat().st_size
            for _ in range(2):
                with context.restore_path(storage_id):
                    assert sum(seen) == total


class TestPrivate:
    """Copies for one use only."""

    def test_no_shared_download(self, machine: Machine) -> None:
        storage_id = machine.store()
        machine.restore(storage_id)
        with alone() as distributed:
            context, store = machine.job(distributed)
            with context.restore_path(storage_id, NO) as path, context.restore_path(storage_id, NO) as other:
                assert path != other
                assert tree(path) == tree(other)
                assert store.in_use() == {storage_id}
            assert not path.exists() and not other.exists()
            assert len(store.fetched) == 2 * (len(MANY) + 1)
        assert len(machine.entries()) == 1

    def test_it_goes_also_when_the_block_fails(self, machine: Machine) -> None:
        storage_id = machine.store()
        with alone() as distributed:
            context, _ = machine.job(distributed)
            with pytest.raises(ArithmeticError), context.restore_path(storage_id, NO):
                raise ArithmeticError
        assert machine.entries() == []

    def test_any_rank_alone_may_ask_for_one(self, machine: Machine) -> None:
        storage_id = machine.store()

        def work(distributed: core.DistributedContext) -> int:
            context, _ = machine.job(distributed)
            if distributed.rank == 0:
                return 0
            with context.restore_path(storage_id, NO) as path:
                return len(tree(path))

        assert as_ranks(2, work) == [0, len(MANY) + 1]

    @pytest.mark.parametrize("mode", list(DownloadMode))
    def test_what_others_wrote_is_never_kept(
        self, mode: DownloadMode, machine: Machine, caplog: pytest.LogCaptureFixture
    ) -> None:
        """There is nothing to compare it with, so it is fetched anew; but still once per machine."""
        fill(machine.root / "theirs", {**FILES, "metadata.json": b'{"steps_completed": 12}'})
        with caplog.at_level(logging.WARNING):
            found, fetched = machine.restore("theirs", mode)
        assert {name: found[name] for name in FILES} == FILES
        assert fetched == sorted([*FILES, "metadata.json"])
        assert "unverified" in caplog.text
        assert machine.entries() == []
        fill(machine.root / "theirs", {"rng": b"R"})
        assert machine.restore("theirs", mode)[0]["rng"] == b"R"
        assert machine.recorder.restored == [("theirs", 12)] * 2

    def test_ranks_share_what_others_wrote(self, machine: Machine) -> None:
        fill(machine.root / "theirs", FILES)
        store = Elsewhere(machine.root)

        def work(distributed: core.DistributedContext) -> Path:
            context, _ = machine.job(distributed, store)
            with context.restore_path("theirs") as path:
                assert tree(path) == FILES
                return path

        assert len(set(as_ranks(3, work))) == 1
        assert store.names == sorted(FILES)
        assert machine.entries() == []


class TestRanks:
    """Ranks of one machine, and of two."""

    def each(self, size: int, machine: Machine, work: Callable[[CheckpointContext, int], Any]) -> list[Any]:
        """What each rank returned or raised."""

        def run(distributed: core.DistributedContext) -> Any:
            context, self.stores[distributed.rank] = machine.job(distributed, self.stores.get(distributed.rank))
            try:
                return work(context, distributed.rank)
            except DetCoreError as e:
                return e

        self.stores = {rank: Elsewhere(machine.root) for rank in range(size)} | getattr(self, "stores", {})
        return as_ranks(size, run)

    def test_they_split_the_files(self, machine: Machine) -> None:
        storage_id = machine.store()

        def work(context: CheckpointContext, rank: int) -> Path:
            for _ in range(2):
                with context.restore_path(storage_id) as path:
                    assert {name: tree(path)[name] for name in MANY} == MANY
            return path

        assert len(set(self.each(3, machine, work))) == 1
        names = [store.names for store in self.stores.values()]
        assert sorted(n for part in names for n in part) == sorted([*MANY, "metadata.json"])
        assert all(len(part) >= 5 for part in names)
        machine.nobody_reads()

    @pytest.mark.parametrize("bad", [0, 1])
    def test_a_failure_of_one_is_told_to_all(self, bad: int, machine: Machine) -> None:
        storage_id = machine.store()

        def refuse(name: str) -> None:
            raise CheckpointError(f"no {name} today")

        def work(context: CheckpointContext, rank: int) -> None:
            with context.restore_path(storage_id):
                raise AssertionError("the block was entered")

        self.stores = {bad: Elsewhere(machine.root)}
        self.stores[bad].arriving = refuse
        errors = self.each(3, machine, work)
        for rank, error in enumerate(errors):
            assert isinstance(error, CheckpointError) and "today" in str(error)
            assert rank == bad or f"rank {bad}: no " in str(error)
        machine.restore(storage_id)
        machine.nobody_reads()

    def test_a_chief_that_cannot_mark_the_checkpoint_is_told_of(self, machine: Machine) -> None:
        storage_id = machine.store()

        class Unmarked(Elsewhere):
            def hold(self, storage_id: str, owner: Any) -> Any:
                raise StorageError(5, "no marks today")

        def work(context: CheckpointContext, rank: int) -> None:
            with context.restore_path(storage_id):
                raise AssertionError("the block was entered")

        self.stores = {0: Unmarked(machine.root)}
        for error in self.each(2, machine, work):
            assert isinstance(error, StorageError) and "no marks today" in str(error)

    def test_ranks_that_do_not_see_one_folder_are_told(self, machine: Machine) -> None:
        """As in two containers of one machine: what the one brings, the other lacks."""
        storage_id = machine.store(files={"a": b"a", "b": b"b"})

        def vanish(name: str) -> None:
            if not gone:
                gone.extend(until(lambda: list(machine.folder.glob(f"cache/*/{storage_id}/[abm]*"))))
                for path in gone:
                    path.unlink()

        gone: list[Path] = []

        def work(context: CheckpointContext, rank: int) -> None:
            with context.restore_path(storage_id):
                raise AssertionError("the block was entered")

        self.stores = {1: Elsewhere(machine.root)}
        self.stores[1].arriving = vanish
        for error in self.each(2, machine, work):
            assert isinstance(error, StorageError) and "do all of them see the same folder" in str(error)


class TestMachines:
    """Four ranks on two machines."""

    def each(self, machines: list[Machine], storage_id: str, stores: dict[int, Elsewhere]) -> list[Any]:
        port, found = free_port(), {}

        def run(rank: int) -> None:
            try:
                with core.DistributedContext(
                    rank=rank, size=4, local_rank=rank % 2, local_size=2, cross_rank=rank // 2, cross_size=2,
                    chief_ip="127.0.0.1", pub_port=port, insecure=True,
                ) as distributed:  # fmt: skip
                    context, _ = machines[rank // 2].job(distributed, stores[rank])
                    with context.restore_path(storage_id, selector=lambda path: path != "f0") as path:
                        found[rank] = (path, set(tree(path)))
            except BaseException as e:
                found[rank] = e

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(4)]

    def test_each_fetches_once(self, tmp_path: Path) -> None:
        machines = [Machine(tmp_path), Machine(tmp_path)]
        machines[1].cache = CheckpointCache(tmp_path / "cache of another machine", AMPLE)
        storage_id = machines[0].store()
        stores = {rank: Elsewhere(tmp_path / "store") for rank in range(4)}
        found = self.each(machines, storage_id, stores)
        expected = {*MANY, "metadata.json"} - {"f0"}
        assert [names for _, names in found] == [expected] * 4
        assert found[0][0] == found[1][0] != found[2][0] == found[3][0]
        for first in (0, 2):
            assert sorted(stores[first].names + stores[first + 1].names) == sorted(expected)
        # With one cache for both, as on a home folder that all machines see, it is fetched once in all.
        (tmp_path / "third").mkdir()
        for machine in machines:
            machine.cache = CheckpointCache(tmp_path / "third" / "cache", AMPLE)
        stores = {rank: Elsewhere(tmp_path / "store") for rank in range(4)}
        assert [names for _, names in self.each(machines, storage_id, stores)] == [expected] * 4
        assert sorted(n for store in stores.values() for n in store.names) == sorted(expected)

    def test_a_failure_on_one_is_told_to_the_other(self, tmp_path: Path) -> None:
        machines = [Machine(tmp_path), Machine(tmp_path)]
        machines[1].cache = CheckpointCache(tmp_path / "cache of another machine", AMPLE)
        storage_id = machines[0].store()
        stores = {rank: Elsewhere(tmp_path / "store") for rank in range(4)}

        def refuse(name: str) -> None:
            raise CheckpointError(f"no {name} today")

        stores[3].arriving = refuse
        found = self.each(machines, storage_id, stores)
        assert all(isinstance(error, CheckpointError) and "rank 3: no " in str(error) for error in found[:3])
        assert isinstance(found[3], CheckpointError)


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def harm(path: Path, how: str) -> None:
    """Do something to a file."""
    if how == "flipped":
        flip(path)
    elif how == "truncated":
        os.truncate(path, 5)
    elif how == "missing":
        path.unlink()
    elif how == "a link":
        path.unlink()
        path.symlink_to("/etc/hostname")
    else:
        path.write_bytes((path.parent / "f9").read_bytes())
