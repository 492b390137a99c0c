"""A supervisor that is stopped, killed, or watches a script that will not die; what a script sees of the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from det_core.master.engines import Cause, _watch
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._local import _spawn
from det_core.master.engines._logs import last_lines
from support.disks import fill, small_disk
from support.engine_suite import FOREVER, Bench, alive, key, numbers, spec, until
from support.engines import Local, run, texts
from support.processes import suspend


def folder_of(tmp_path: Path, name: str) -> AllocationFolder:
    return AllocationFolder(tmp_path / "home" / "master" / "allocations" / key(name))


def may_unshare() -> bool:
    return any(
        subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0 for flags in ("-m", "-Urm")
    )


async def running(bench: Bench, tmp_path: Path, script: str = f"echo ready; {FOREVER}") -> dict[str, int]:
    """Launch an allocation, and return the processes around its script."""
    await bench.engine.launch(spec("a", script))
    await bench.line_of("a", "ready")
    return {name: found[0] for name, found in folder_of(tmp_path, "a").processes().items() if name != "boot"}


LEAVES = (
    "(setsid sleep 1000 & echo $! >> {pids}); (env -i sleep 1000 & echo $! >> {pids});"
    "sh -c 'trap \"\" TERM HUP INT; sleep 1000; sleep 1000' 2>/dev/null & echo $! >> {pids}; echo $$ >> {pids};"
    "echo ready; exec 2>/dev/null; while :; do sleep 0.1; done"  # both shells may tell that their sleeps were killed
)


@pytest.mark.parametrize("watched", [True, False])
async def test_a_supervisor_that_is_killed_leaves_nothing(tmp_path: Path, watched: bool) -> None:
    pids = tmp_path / "pids"

    async def kill(bench: Bench) -> None:
        found = await running(bench, tmp_path, LEAVES.format(pids=pids))
        await until(lambda: len(numbers(pids)) == 4)
        if not watched:
            await bench.engine.close()
        os.kill(found["supervisor"], signal.SIGKILL)

    async def check(bench: Bench) -> None:
        exit = await bench.end_of("a")
        assert exit.cause is Cause.LOST
        assert "supervisor was killed" in exit.detail
        assert not [pid for pid in numbers(pids) if alive(pid)]

    async with Local().bench(tmp_path) as bench:
        await kill(bench)
        if watched:
            await check(bench)
    if not watched:
        async with Local().bench(tmp_path, known={key("a"): None}) as second:
            await check(second)
            assert texts(second, key("a")) == ["ready"]


async def test_a_kill_reaches_past_a_supervisor_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watch, "OVERDUE_TIMEOUT", 0.5)
    async with Local().bench(tmp_path) as bench:
        found = await running(bench, tmp_path)
        suspend(found["supervisor"])
        await bench.engine.kill(key("a"))
        exit = await bench.end_of("a")
        assert exit.cause is Cause.CANCELLED
        assert not [pid for pid in found.values() if alive(pid)]


async def test_signals_to_the_supervisor_do_not_end_it(tmp_path: Path) -> None:
    async with Local().bench(tmp_path) as bench:
        found = await running(bench, tmp_path, f"echo ready; trap 'echo got it; exit 9' TERM; {FOREVER}")
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(found["supervisor"], signum)
        await asyncio.sleep(0.2)
        await bench.engine.kill(key("a"))  # the script gets SIGTERM first, and its trap works
        exit = await bench.end_of("a")
        assert (exit.status, exit.cause) == (9, Cause.CANCELLED)
        assert "got it" in texts(bench, key("a"))


async def test_processes_that_multiply_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    more = f"[ $(wc -l < {pids}) -lt 50 ] && sh $0 & sleep 0.02"
    (tmp_path / "grow.sh").write_text(f"echo $$ >> {pids}; trap '' TERM; for i in 1 2 3; do {more}; done; sleep 1000")
    async with Local().bench(tmp_path) as bench:
        await bench.engine.launch(spec("a", f"exec sh {tmp_path}/grow.sh"))
        await until(lambda: len(numbers(pids)) > 20)
        await bench.engine.kill(key("a"))
        assert (await bench.end_of("a")).cause is Cause.CANCELLED
        await asyncio.sleep(0.1)
        assert not [pid for pid in numbers(pids) if alive(pid)]


@pytest.mark.skipif(not may_unshare(), reason="no mount namespace may be made here")
async def test_each_trial_finds_its_own_files_at_the_fixed_path(tmp_path: Path) -> None:
    show = "import json, os; print(json.load(open('/run/determined/info/cluster.json'))['allocation_id'], os.getuid());"
    show += "print(sorted(set(os.listdir('/run')) - {'determined'}) == " + repr(sorted(os.listdir("/run"))) + ");"
    show += "print(os.path.realpath('/run/determined/workdir') == os.getcwd())"
    async with Local().bench(tmp_path) as bench:
        for name in ("a", "b"):
            await bench.engine.launch(replace(spec(name), command=["python", "-c", show]))
        for name in ("a", "b"):
            exit = await bench.end_of(name)
            assert exit.status == 0, exit.last_lines
            assert texts(bench, key(name)) == [f"{key(name)} {os.getuid()}", "True", "True"]
    assert not Path("/run/determined").exists()


async def test_two_allocations_have_ports_of_their_own(tmp_path: Path) -> None:
    script = "echo $DTRAIN_SSH_PORT $INTER_TRAIN_PROCESS_COMM_PORT_1 $INTER_TRAIN_PROCESS_COMM_PORT_2 $C10D_PORT"
    script += "; sleep 0.5"
    async with Local().bench(tmp_path) as bench:
        await bench.engine.launch(spec("a", script))
        async with Local().bench(tmp_path, known={key("a"): None}) as second:
            await second.engine.launch(replace(spec("b", script), trial_id=2))
            await second.end_of("a"), await second.end_of("b")
            a, b = (texts(second, key(name))[0].split() for name in ("a", "b"))
            assert len({*a, *b}) == 8


def test_supervisor_of_another_node_writes_that_nodes_log(tmp_path: Path) -> None:
    folder = AllocationFolder(tmp_path / "a")
    folder.create(spec("a"))
    folder.write_start(["sh", "-c", "echo of node 2"], {"PATH": os.defpath}, node=2)
    os.waitpid(_spawn(folder), 0)
    assert last_lines(folder.log, node=2) == ("of node 2",)
    assert last_lines(folder.log) == ()


async def test_a_launch_that_a_death_cut_short_is_lost(tmp_path: Path) -> None:
    folder_of(tmp_path, "a").create(spec("a"))
    async with Local().bench(tmp_path, known={key("a"): None}) as bench:
        assert (await bench.end_of("a")).cause is Cause.NOT_STARTED


async def test_what_cannot_be_written_is_told_as_an_end(tmp_path: Path) -> None:
    async with Local().bench(tmp_path) as bench:
        (tmp_path / "home" / "master").mkdir(parents=True)
        (tmp_path / "home" / "master" / "allocations").write_text("in the way")
        await bench.engine.launch(spec("a"))
        exit = await bench.end_of("a")
        assert exit.cause is Cause.NOT_STARTED
        assert str(tmp_path) in exit.detail
        await bench.engine.forget(key("a"))
        await bench.engine.launch(spec("a"))
        (tmp_path / "home" / "master" / "allocations").unlink()


def test_the_supervisor_costs_little_to_start() -> None:
    """No bound on time here; that is what ``benchmarks/`` are for. What it may import is bounded."""
    from det_core.master.engines import _supervisor

    *python, program, here, root, _ = _supervisor.command("folder")
    program = program.replace("main(sys.argv[3])", "print(*sys.modules)")
    answer = subprocess.run([*python, program, here, root], capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split())
    assert loaded.isdisjoint({"asyncio", "socket", "logging", "pathlib", "site"})
    assert {name for name in loaded if name.startswith("det_core.")} == {
        f"det_core._standalone{name}" for name in ("", ".files", ".processes")
    }


def test_a_disk_that_is_full_at_the_end_keeps_no_end_from_being_known(tmp_path: Path) -> None:
    async def work() -> None:
        async with Local().bench(tmp_path) as bench:
            await bench.engine.launch(spec("a", f"echo ready; while [ ! -e {tmp_path}/full ]; do sleep 0.02; done"))
            await bench.line_of("a", "ready")
            fill(tmp_path / "home")
            (tmp_path / "full").touch()
            exit = await bench.end_of("a")
            assert (exit.status, exit.cause) == (0, Cause.NONE)

    with small_disk(tmp_path / "home", "2m"):
        run(work())
