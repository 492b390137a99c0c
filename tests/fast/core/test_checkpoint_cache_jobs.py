"""Jobs that share a cache, and die in it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import TESTS, warm
from support.caches import FILES, SIZE, entries, kept, restored, store
from support.checkpoints import fill, tree
from support.disks import FaultyDisk
from support.processes import until
from support.ranks import running


class Job:
    """A process that restores; what it says is in a file."""

    def __init__(self, folder: Path, storage_id: str, limit: int, hold: int) -> None:
        arguments = [str(folder / "store"), str(folder / "cache"), str(limit), storage_id, str(hold)]
        self.out = folder / f"out-{time.monotonic_ns()}"
        read, self._write = os.pipe()
        with self.out.open("wb") as out:
            self.process = warm.start(
                ["-m", "support.elsewhere", *arguments], cwd=TESTS, stdin=read, stdout=out.fileno()
            )
        os.close(read)

    def said(self, text: str, times: int = 1) -> str:
        """The line that begins with ``text``, once it has said so many."""

        def lines() -> list[str]:
            return [line for line in self.out.read_text().splitlines() if line.startswith(text)][times - 1 :]

        return until(lines, self.out.read_text, of=self.process)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def let_go(self) -> None:
        """Have it leave its block."""
        os.write(self._write, b"\n")

    def close(self) -> None:
        self.kill()
        os.close(self._write)


@contextmanager
def job(folder: Path, storage_id: str, *, limit: int = 1 << 30, hold: int = 0) -> Iterator[Job]:
    """A process that restores; it is killed at the end."""
    started = Job(folder, storage_id, limit, hold)
    try:
        yield started
    finally:
        started.close()


class TestJobs:
    """Jobs as processes of their own."""

    def test_they_share_one_fetch(self, tmp_path: Path) -> None:
        (a,) = store(tmp_path, "many")
        with job(tmp_path, a) as one, job(tmp_path, a) as two, job(tmp_path, a) as three:
            lines = [each.said("files").split() for each in (one, two, three)]
        assert [line[1] for line in lines] == ["11"] * 3
        assert sorted(int(line[3]) for line in lines) == [0, 0, SIZE], "bytes are fetched once"

    def test_one_that_is_killed_while_it_fetches_is_followed(self, tmp_path: Path) -> None:
        """The next one waits while it lives, takes over what it has, and fetches the rest."""
        (a,) = store(tmp_path, "many")
        with job(tmp_path, a, hold=2) as one:
            one.said("fetching", times=2)
            with job(tmp_path, a) as two:
                two.said("locks")
                one.kill()
                line = two.said("files").split()
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
        with job(tmp_path, a, hold=1) as one:
            one.said("fetching")
            (aside,) = tmp_path.glob("cache/*/aside-*")
            one.kill()
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
            one.said("open")
            with restored(tmp_path, b, SIZE):
                assert kept(tmp_path) == {a, b}, "a living process reads it"
            one.kill()
        with restored(tmp_path, b, SIZE):
            assert kept(tmp_path) == {b}

    def test_a_reader_keeps_its_files_when_others_fill_the_cache(self, tmp_path: Path) -> None:
        a, b = store(tmp_path, "a", "b")
        with job(tmp_path, a, limit=SIZE) as one:
            one.said("open")
            with restored(tmp_path, b, SIZE):
                pass
            assert a in kept(tmp_path)
            one.let_go()
            one.said("closed")
        assert kept(tmp_path) <= {a, b} and len(kept(tmp_path)) == 1

    def test_private_copies_of_the_dead_go(self, tmp_path: Path) -> None:
        fill(tmp_path / "store" / "theirs", FILES)
        (a,) = store(tmp_path, "a")
        with job(tmp_path, "theirs") as one:
            one.said("open")
            (private,) = entries(tmp_path)
            with restored(tmp_path, a, 1 << 30):
                assert private in entries(tmp_path)
            one.kill()
        assert private.exists()
        with restored(tmp_path, a, 1 << 30):
            assert not private.exists()


RANK = """
import os, signal, sys
from pathlib import Path
from det_core import core
from det_core.errors import PeerLost
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
            if distributed.rank == 0:
                signal.pause()

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
        assert ranks.wait()[1:] == [0, 0]
        for rank in (1, 2):
            assert "open" not in ranks.output(rank)
            assert "lost rank 0" in ranks.output(rank)
    with restored(tmp_path, a, 1 << 30) as (path, elsewhere):
        assert elsewhere.fetched == [] and {name: tree(path)[name] for name in FILES} == FILES


BUSY = """
import random, sys, time
from pathlib import Path
from det_core.core import DownloadMode
from det_core.core._checkpoint import CheckpointCache
from support.checkpoints import Recorder, alone
from support.elsewhere import Elsewhere

root, cache, limit, ids = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[5:]
chance = random.Random(sys.argv[4])
modes = [DownloadMode.NoSharedDownload, *[DownloadMode.LocalWorkersShareDownload] * 4]
with alone() as distributed:
    while True:
        storage_id, letter = chance.choice(ids).split(":")
        store = Elsewhere(root)
        store.arriving = lambda name: time.sleep(chance.choice([0, 0, 0.01]))
        context = Recorder().context(distributed, root, store=store, cache=CheckpointCache(cache, limit))
        some = chance.choice([None, None, set(chance.sample([f"f{i}" for i in range(10)], 3))])
        selector = None if some is None else some.__contains__
        with context.restore_path(storage_id, chance.choice(modes), selector=selector) as path:
            for _ in range(2):
                names = {p.name for p in path.iterdir()}
                assert names >= (some or {f"f{i}" for i in range(10)}), names
                for name in names - {"metadata.json"}:
                    assert (path / name).read_bytes() == letter.encode() * 10_000, name
                time.sleep(chance.random() * 0.02)
        print("restored", flush=True)
"""


def killed_jobs(folder: Path, times: int, seed: int) -> None:
    """Four jobs at a time restore this and that from a cache that holds half of it; one after the other is killed."""
    chance = random.Random(seed)
    ids = [f"{found}:{letter}" for letter, found in zip("abcd", store(folder, *"abcd"), strict=True)]
    script = folder / "busy.py"
    script.write_text(BUSY)
    arguments = [script, folder / "store", folder / "cache", str(5 * SIZE // 2)]

    def start(number: int) -> tuple[warm.Started, Path]:
        out = folder / f"out{number}"
        with out.open("wb") as file:
            words = [*arguments, f"{seed}.{number}", *ids]
            return warm.start(words, env={**os.environ, "PYTHONPATH": str(TESTS)}, stdout=file.fileno()), out

    jobs = [start(number) for number in range(4)]
    for number in range(4, 4 + times):
        process, out = jobs.pop(chance.randrange(2))
        until(lambda out=out: "restored" in out.read_text(), out.read_text, of=process)  # type: ignore[misc]
        time.sleep(chance.random() * 0.1)
        assert process.poll() is None, f"seed {seed}: {out.read_text()[-3000:]}"
        process.kill()
        process.wait()
        jobs.append(start(number))
    for process, _ in jobs:
        process.kill()
        process.wait()
    a = ids[0].partition(":")[0]
    with restored(folder, a, SIZE):
        pass
    assert kept(folder) == {a} and len(entries(folder)) == 1


def test_jobs_that_are_killed_at_random_spoil_nothing_for_the_others(tmp_path: Path) -> None:
    killed_jobs(tmp_path, 6, seed=1)


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
