"""Contract of every engine, as tests to inherit.

::

    class TestMyEngine(EngineSuite):
        def make_engine(self, home, slots): return MyEngine(home, slots)

The engine has to run its allocations on this machine, with ``sh`` and ``python``.
"""

from __future__ import annotations

import asyncio
import io
import json
import signal
import tarfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from det_core.journal import Journal
from det_core.master.engines import (
    AllocationFolder,
    Cause,
    Claim,
    Copy,
    Ended,
    Engine,
    Event,
    ExitReport,
    LogLine,
    Piece,
    Position,
    Ticket,
    TrialLog,
)

PATIENCE = 90.0
CODE = "claim code"
FOREVER = "while :; do sleep 0.1; done"


class EngineSuite(ABC):
    """Inherit, and say how to make the engine."""

    @abstractmethod
    def make_engine(self, home: Path, slots: int) -> Engine:
        """Return an engine with ``slots`` slots; a second call with the same ``home`` finds what the first runs."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one test's work, not for ever."""
        asyncio.run(asyncio.wait_for(work, PATIENCE))

    def test_exits_are_told_as_they_were(self, tmp_path: Path) -> None:
        cases = {
            "ok": ("exit 0", 0, None),
            "bad": ("echo why >&2; exit 3", 3, None),
            "large": ("exit 255", 255, None),
            "signalled": ("kill -SEGV $$", None, signal.SIGSEGV),
            "killed": ("kill -9 $$", None, signal.SIGKILL),
        }

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                for name, (script, _, _) in cases.items():
                    await bench.engine.launch(spec(name, script))
                for name, (_, status, signum) in cases.items():
                    exit = await bench.end_of(name)
                    assert (exit.status, exit.signal) == (status, signum), name
                    assert exit.cause is Cause.NONE
                    assert exit.detail
                assert bench.ended[key("bad")][0].last_lines == ("why",)

        self.run(work())

    def test_what_cannot_be_run_is_named(self, tmp_path: Path) -> None:
        plain = tmp_path / "plain.txt"
        plain.write_text("text")

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(replace(spec("none"), command=["no-such-program", "x"]))
                await bench.engine.launch(replace(spec("plain"), command=[str(plain)]))
                missing, refused = await bench.end_of("none"), await bench.end_of("plain")
                assert (missing.status, refused.status) == (127, 126)
                assert "no-such-program" in missing.detail
                assert str(plain) in refused.detail

        self.run(work())

    def test_output_comes_in_order_with_rank_and_level(self, tmp_path: Path) -> None:
        script = (
            "echo one; sleep 0.05; echo '[rank=3] WARNING: two' >&2; sleep 0.05; echo 'ERROR: three';"
            "echo; printf 'bar 1\\rbar 2\\r\\nno end'"
        )

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("a", script))
                await bench.end_of("a")
                lines = bench.lines("a")
                assert [(x.stream, x.rank, x.level, x.text) for x in lines] == [
                    ("stdout", None, None, "one"),
                    ("stderr", 3, "WARNING", "two"),
                    ("stdout", None, "ERROR", "three"),
                    ("stdout", None, None, ""),
                    ("stdout", None, None, "bar 1"),
                    ("stdout", None, None, "bar 2"),
                    ("stdout", None, None, "no end"),
                ]
                assert [x.time for x in lines] == sorted(x.time for x in lines)

        self.run(work())

    def test_any_output_is_taken_and_none_is_lost(self, tmp_path: Path) -> None:
        script = (
            "import os, sys\n"
            "out = os.fdopen(1, 'wb', closefd=False)\n"
            "out.write(bytes(range(256)) * 100 + b'\\n')\n"
            "out.write(b'x' * 10_000_000 + b'\\n')\n"
            "out.write(''.join(f'{i} \\u00fc\\u4e2d\\n' for i in range(20000)).encode())\n"
            "out.flush()\n"
        )

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(replace(spec("a"), command=["python", "-c", script]))
                assert (await bench.end_of("a")).status == 0
                text = [line.text for line in await asyncio.to_thread(bench.lines, "a")]
                assert text[-20000:] == [f"{i} \u00fc\u4e2d" for i in range(20000)]
                assert sum(len(t) for t in text if t and set(t) == {"x"}) == 10_000_000

        self.run(work())

    def test_kill_ends_every_process(self, tmp_path: Path) -> None:
        script = (
            "trap '' TERM; echo $$ >> pids;"
            "sleep 1000 & echo $! >> pids;"
            "setsid sh -c 'trap \"\" TERM HUP; echo $$ >> pids; sleep 1000 & echo $! >> pids; wait' &"
            "(setsid env -i sleep 1000 & echo $! >> pids);"
            f"echo ready; {FOREVER}"
        ).replace(">> pids", f">> {tmp_path}/pids")

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("a", script))
                await bench.line_of("a", "ready")
                await until(lambda: len(numbers(tmp_path / "pids")) == 5)
                assert all(alive(pid) for pid in numbers(tmp_path / "pids"))
                await bench.engine.kill(key("a"))
                await bench.engine.kill(key("a"))
                exit = await bench.end_of("a")
                assert exit.cause is Cause.CANCELLED
                assert not [pid for pid in numbers(tmp_path / "pids") if alive(pid)]

        self.run(work())

    def test_nothing_outlives_the_script(self, tmp_path: Path) -> None:
        script = f"sleep 1000 & echo $! >> {tmp_path}/pids; setsid sleep 1000 & echo $! >> {tmp_path}/pids; exit 7"

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("a", script))
                exit = await bench.end_of("a")
                assert (exit.status, exit.cause) == (7, Cause.NONE)
                assert not [pid for pid in numbers(tmp_path / "pids") if alive(pid)]

        self.run(work())

    def test_terminate_kills_after_the_grace_unless_it_ended(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("slow", f"echo ready; {FOREVER}"))
                await bench.engine.launch(spec("quick", "echo ready; sleep 0.3; exit 4"))
                for name in ("slow", "quick"):
                    await bench.line_of(name, "ready")
                    await bench.engine.terminate(key(name), 0.8)
                quick, slow = await bench.end_of("quick"), await bench.end_of("slow")
                assert (quick.status, quick.cause) == (4, Cause.NONE)
                assert slow.cause is Cause.CANCELLED
                await bench.engine.kill(key("quick"))
                await bench.engine.kill("1.unknown.1")

        self.run(work())

    def test_a_kill_during_the_launch_or_right_after_is_heard(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                during = [asyncio.create_task(bench.engine.launch(spec(f"a{i}", FOREVER))) for i in range(2)]
                await asyncio.sleep(0)
                await bench.engine.kill(key("a0"))
                await bench.engine.terminate(key("a1"), 0.3)
                await asyncio.gather(*during, bench.engine.launch(spec("a2", FOREVER)))
                await bench.engine.kill(key("a2"))
                causes = [(await bench.end_of(f"a{i}")).cause for i in range(3)]
                assert causes == [Cause.CANCELLED] * 3

        self.run(work())

    def test_a_large_configuration_is_no_hindrance(self, tmp_path: Path) -> None:
        show = "import json, os; print(len(json.load(open(os.environ['DET_CORE_INFO_DIR'] + '/trial.json'))['config']))"
        config = {f"key {i}": "x" * 100 for i in range(3000)}

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(replace(spec("a"), command=["python", "-c", show], config=config))
                exit = await bench.end_of("a")
                assert (exit.status, exit.last_lines) == (0, ("3000",))

        self.run(work())

    def test_the_script_is_told_what_it_runs_as(self, tmp_path: Path) -> None:
        script = (
            "import json, os, pathlib\n"
            "info = pathlib.Path(os.environ['DET_CORE_INFO_DIR'])\n"
            "print(json.dumps({p.name: json.loads(p.read_text()) for p in info.iterdir()}))\n"
            "print(json.dumps(dict(os.environ)))\n"
        )
        asked = replace(
            spec("a"),
            command=["python", "-c", script],
            hparams={"lr": 0.1},
            config={"name": "x", "debug": True, "checkpoint_storage": {"type": "directory"}},
            latest_checkpoint="c1",
            steps_completed=9,
            environment={"MINE": "a b\n'c'", "DET_USER": "me"},
        )

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(asked)
                exit = await bench.end_of("a")
                assert exit.status == 0, exit.last_lines
                files, variables = (json.loads(line.text) for line in bench.lines("a"))
                assert files["cluster.json"]["allocation_id"] == key("a")
                assert files["cluster.json"]["latest_checkpoint"] == "c1"
                assert files["cluster.json"]["slot_ids"] == [1]
                assert files["trial.json"]["hparams"] == {"lr": 0.1}
                assert files["trial.json"]["debug"] is True
                assert files["trial.json"]["steps_completed"] == 9
                assert files["rendezvous.json"]["container_slot_counts"] == [1]
                assert "gpu_uuids" in files["resources.json"]
                assert variables["MINE"] == "a b\n'c'"
                assert variables["DET_USER"] == "me"
                assert variables["DET_SESSION_TOKEN"] == "token"
                assert json.loads(variables["DET_EXPERIMENT_CONFIG"]) == asked.config
                assert Path(variables["DET_CORE_RUN_DIR"]).is_dir()

        self.run(work())

    def test_the_context_is_where_the_script_runs(self, tmp_path: Path) -> None:
        context = tmp_path / "context.tgz"
        archive(context, {"model.py": "print('from the model')", "sub/data.txt": "text"})

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("a", "python model.py; cat sub/data.txt; touch mine", context=context))
                await bench.engine.launch(spec("b", "sleep 0.2; ls", context=context))
                await bench.end_of("a"), await bench.end_of("b")
                assert [line.text for line in bench.lines("a")] == ["from the model", "text"]
                assert [line.text for line in bench.lines("b")] == ["model.py", "sub"]

        self.run(work())

    def test_a_context_that_reaches_out_is_refused(self, tmp_path: Path) -> None:
        context = tmp_path / "context.tgz"
        archive(context, {"../out.txt": "text"})

        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("a", "echo it ran", context=context))
                exit = await bench.end_of("a")
                assert exit.cause is Cause.REFUSED
                assert "../out.txt" in exit.detail
                assert bench.lines("a") == []

        self.run(work())

    def test_several_run_at_once(self, tmp_path: Path) -> None:
        meet = "touch met-$DET_TRIAL_SEED; while [ $(ls | grep -c met-) -lt 4 ]; do sleep 0.02; done"
        meet = f"cd {tmp_path}; {meet}"

        async def work() -> None:
            async with self.bench(tmp_path, slots=4) as bench:
                for i in range(4):
                    await bench.engine.launch(replace(spec(f"a{i}", meet), slot_ids=[i], trial_seed=i))
                assert [(await bench.end_of(f"a{i}")).status for i in range(4)] == [0] * 4

        self.run(work())

    def test_bad_requests_are_refused(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("a", "exit 0"))
                await refused(bench.engine.launch(spec("a", "exit 0")))
                await refused(bench.engine.launch(replace(spec("b"), slot_ids=[7])))
                await bench.end_of("a")
                await refused(bench.engine.launch(spec("a", "exit 0")))
                assert len(bench.ended[key("a")]) == 1

        self.run(work())

    def test_what_is_left_in_the_journal_is_handed_over_before_the_end(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.engine.launch(spec("a", f"echo $DET_CORE_RUN_DIR > {tmp_path}/at; echo ready; {FOREVER}"))
                await bench.line_of("a", "ready")
                folder = Path((tmp_path / "at").read_text().strip())
                journal = Journal(folder, run_id=key("a"), restart=0, rank=2, trial_id=1)
                for step in range(3):
                    journal.metrics("training", step, {"loss": float("nan")})
                journal.close()
                await bench.engine.kill(key("a"))
                await bench.end_of("a")
                (at_end,) = bench.journal_at_end[key("a")]
                assert [(rank, record["seq"]) for rank, record in at_end] == [(2, 0), (2, 1), (2, 2)]
                assert at_end[0][1]["metrics"] == {"loss": "NaN"}  # as it stands in the file

        self.run(work())

    def test_what_is_not_taken_is_given_again(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as bench:
                bench.refuse = 1
                await bench.engine.launch(spec("a", f"echo $DET_CORE_RUN_DIR > {tmp_path}/at; echo ready; {FOREVER}"))
                await bench.line_of("a", "ready")
                folder = Path((tmp_path / "at").read_text().strip())
                journal = Journal(folder, run_id=key("a"), restart=0, rank=0, trial_id=1)
                journal.metrics("training", 1, {"loss": 1.0})
                journal.close()
                await bench.engine.kill(key("a"))
                await bench.end_of("a")
                assert bench.refuse == 0
                assert [record["seq"] for _, record in bench.journals[key("a")]] == [0]

        self.run(work())

    def test_a_new_engine_goes_on_where_the_last_one_ended(self, tmp_path: Path) -> None:
        wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
        wait_end = f"while [ ! -e {tmp_path}/end ]; do sleep 0.02; done"
        script = f"i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo line $i; [ $i = 50 ] && {wait}; done; exit 5"

        async def work() -> None:
            async with self.bench(tmp_path) as first:
                await first.engine.launch(spec("runs", script))
                await first.engine.launch(spec("ends", f"echo $$ > {tmp_path}/pid; {wait_end}; exit 6"))
                await first.line_of("runs", "line 50")
                await until(lambda: numbers(tmp_path / "pid"))
                known = [key("runs"), key("ends")]
            (tmp_path / "end").touch()
            await until(lambda: not alive(*numbers(tmp_path / "pid")))
            assert not first.ended
            async with self.bench(tmp_path, known=known) as second:
                assert (await second.end_of("ends")).status == 6
                (tmp_path / "go").touch()
                assert (await second.end_of("runs")).status == 5
                assert [line.text for line in second.lines("runs")] == [f"line {i}" for i in range(1, 101)]
                assert [len(exits) for exits in second.ended.values()] == [1, 1]

        self.run(work())

    def test_an_end_is_told_to_each_engine_until_it_is_forgotten(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as first:
                await first.engine.launch(spec("a", "echo x; exit 3"))
                exit = await first.end_of("a")
            async with self.bench(tmp_path, known=[key("a")]) as second:
                assert await second.end_of("a") == exit
                await second.engine.forget(key("a"))
                await second.engine.forget(key("a"))
                await second.engine.forget("1.unknown.1")
            async with self.bench(tmp_path, kept=["a"]) as third:
                assert [line.text for line in third.lines("a")] == ["x"], "the log of what is forgotten stays"
            async with self.bench(tmp_path, known=[key("a")]) as third:
                assert (await third.end_of("a")).cause is Cause.NOT_STARTED

        self.run(work())

    def test_what_nobody_knows_is_ended(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as first:
                await first.engine.launch(spec("a", f"echo $$ > {tmp_path}/pids; echo ready; {FOREVER}"))
                await first.line_of("a", "ready")
            assert all(alive(pid) for pid in numbers(tmp_path / "pids"))
            async with self.bench(tmp_path, known=()) as second:
                await until(lambda: not any(alive(pid) for pid in numbers(tmp_path / "pids")))
                assert not second.ended

        self.run(work())

    def test_a_kill_reaches_what_an_earlier_engine_launched(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.bench(tmp_path) as first:
                await first.engine.launch(spec("now", FOREVER))
                await first.engine.launch(spec("later", FOREVER))
                await first.engine.terminate(key("later"), 0.5)
            async with self.bench(tmp_path, known=[key("now"), key("later")]) as second:
                await second.engine.kill(key("now"))
                assert (await second.end_of("now")).cause is Cause.CANCELLED
                assert (await second.end_of("later")).cause is Cause.CANCELLED

        self.run(work())

    @asynccontextmanager
    async def bench(
        self, folder: Path, *, slots: int = 2, known: Collection[str] = (), kept: Collection[str] = ()
    ) -> AsyncIterator[Bench]:
        """Yield a bench with an engine at work in ``folder``, and a listener."""
        bench = Bench(self.make_engine(folder / "home", slots), folder / "home")
        assert bench.engine.pool.slots == slots
        await bench.engine.recover(dict.fromkeys(known), bench, {f"1.{name}": 1 for name in kept})
        task = asyncio.create_task(bench.listen())
        try:
            yield bench
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await bench.engine.close()


@dataclass
class Bench:
    """Listens to an engine, and keeps what it says."""

    engine: Engine
    home: Path
    journals: dict[str, list[tuple[int, Mapping[str, Any]]]] = field(default_factory=dict)
    ended: dict[str, list[ExitReport]] = field(default_factory=dict)
    journal_at_end: dict[str, list[list[tuple[int, Mapping[str, Any]]]]] = field(default_factory=dict)
    refuse: int = 0
    moves: list[Event] = field(default_factory=list)
    runners: dict[tuple[str, int], str] = field(default_factory=dict)

    def lines(self, name: str) -> list[LogLine]:
        """Return the lines that an allocation has printed so far."""
        log = TrialLog(self.home / "master" / "allocations", f"1.{name}", 1)
        page = log.read(Position())
        lines = [placed.line for placed in page.lines]
        while not page.is_end:
            page = log.read(page.next)
            lines += [placed.line for placed in page.lines]
        return lines

    async def journal(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take records, or not."""
        if self.refuse:
            self.refuse -= 1
            raise OSError("the store is full")
        self.journals.setdefault(allocation_id, []).extend((rank, record) for record in records)

    async def claim(self, allocation_id: str, node: int, code: str, runner: str) -> Claim:
        """Grant the claim of the first runner."""
        assert code == CODE and self.runners.setdefault((allocation_id, node), runner) == runner
        return Claim(f"token of node {node}", "token")

    async def open_context(self, digest: str) -> IO[bytes]:
        """Open a context, which is named by its path here."""
        return open(digest, "rb")

    async def deliver(self, allocation_id: str, node: int, token: str, piece: Piece) -> int:
        """Take a piece into the folder of the master."""
        assert token == f"token of node {node}" and allocation_id not in self.ended
        copy = Copy(AllocationFolder(self.home / "master" / "allocations" / allocation_id), node)
        return await asyncio.to_thread(copy.take, piece)

    async def reports(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Ignore the reports, which repeat the journaled records at the end."""

    async def listen(self) -> None:
        """Take what has ended."""
        async for event in self.engine.events():
            if not isinstance(event, Ended):
                self.moves.append(event)
                continue
            self.ended.setdefault(event.allocation_id, []).append(event.exit)
            so_far = list(self.journals.get(event.allocation_id, ()))
            self.journal_at_end.setdefault(event.allocation_id, []).append(so_far)

    async def end_of(self, name: str) -> ExitReport:
        """Wait for an allocation's end and return its exit report."""
        await until(lambda: key(name) in self.ended)
        return self.ended[key(name)][0]

    async def line_of(self, name: str, text: str) -> None:
        """Wait for a line of an allocation's."""
        await until(lambda: any(line.text == text for line in self.lines(name)) or key(name) in self.ended)
        assert key(name) not in self.ended, self.ended[key(name)]


def key(name: str) -> str:
    """Return the ID of a test's allocation."""
    return f"1.{name}.1"


def spec(name: str, script: str = "exit 0", *, context: Path | None = None) -> Ticket:
    """Return an allocation that runs a shell script on slot 1."""
    return Ticket(
        allocation_id=key(name), task_id=f"1.{name}", experiment_id=1, trial_id=1, trial_run_id=1, trial_seed=3,
        hparams={}, config={}, slots=1, slot_ids=[1], code=CODE, master_url="http://127.0.0.1:8080",
        command=["sh", "-c", script], context=None if context is None else str(context),
    )  # fmt: skip


def archive(path: Path, files: Mapping[str, str]) -> None:
    """Write a context archive."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


async def until(true: Callable[[], object]) -> None:
    """Wait for something to become true."""
    while not true():
        await asyncio.sleep(0.01)


async def refused(work: Coroutine[Any, Any, None]) -> None:
    """Expect a ValueError."""
    try:
        await work
    except ValueError:
        return
    raise AssertionError("it was not refused")


def numbers(path: Path) -> list[int]:
    """Return the numbers in a file, one a line."""
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
