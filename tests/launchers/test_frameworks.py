"""Every launcher around its real framework, on one machine."""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.frameworks import (
    FRAMEWORKS,
    PRINTS,
    Framework,
    assert_all_was_printed,
    framework,
    places,
    told,
    unprefixed,
    variables,
)
from support.launcher import Launched, launched, write

__all__ = ["framework"]
SAVES = """
    import os, signal, sys, time
    rank = os.environ[sys.argv[1]]
    got = []
    signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
    print("ready", os.getpid(), flush=True)
    while not got:
        time.sleep(0.01)
    with open(f"saved-{rank}", "w") as file:
        file.write(" ".join(map(str, got)))
"""
FAILS = """
    import os, sys, time
    rank = int(os.environ[sys.argv[1]])
    if rank == 1:
        for i in range(30):
            print("line", i)
        sys.exit(3)
    time.sleep(600)
"""
STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda n, f: print("received", flush=True))
    os.fork()
    print("ready", os.getpid(), flush=True)
    while True:
        time.sleep(0.1)
"""


def start(
    framework: Framework, folder: Path, processes: int, script: str, *options: str
) -> AbstractContextManager[Launched]:
    """Start our launcher with so many processes of a script, which is given the name of the rank variable."""
    words = script.split(" ")
    command = framework.local(processes, *options)
    return launched(command, words[0], framework.rank, *words[1:], folder=folder, **variables())


def test_every_rank_has_its_numbers(framework: Framework, tmp_path: Path) -> None:
    with launched(framework.local(2), framework.who(tmp_path), folder=tmp_path, **variables()) as job:
        assert job.wait() == 0, job.err
        job.nothing_left()
    found = told(job.out)
    assert sorted(found) == [0, 1]
    for ranks in found.values():
        assert [rank[:2] for rank in ranks] == places({socket.gethostname(): 2})
        assert len({rank[2] for rank in ranks}) == 1 and ranks[0][2], "one secret, handed to every rank"
    assert unprefixed(job.out) == []
    assert [line for line in unprefixed(job.err) if not line.startswith("[launcher] ")] == []


def test_sigterm_lets_every_rank_save(framework: Framework, tmp_path: Path) -> None:
    write(tmp_path, "saves.py", SAVES)
    with start(framework, tmp_path, 2, "saves.py") as job:
        job.wait_for("ready", times=2)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 0, job.err
        job.nothing_left()
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["15", "15"], "once each"
    assert job.err == "[launcher] SIGTERM forwarded to 2 ranks; grace period 60 s\n"


def test_failed_rank_ends_the_others_and_gives_the_status(framework: Framework, tmp_path: Path) -> None:
    write(tmp_path, "fails.py", FAILS)
    with start(framework, tmp_path, 4, "fails.py", "--grace", "4", "--tail", "2") as job:
        assert job.wait() == 3, job.err
        job.nothing_left()
    assert re.match(
        r"\[launcher\] rank 1 \(pid \d+, host \S+\) failed with status 3; 4 s for 3 other ranks to end\n"
        r"\[launcher\] rank 1 \(pid \d+, host \S+\) failed first, with status 3; its last lines:\n"
        r"\[rank=1\] line 28\n\[rank=1\] line 29\n",
        job.err,
    ), job.err


def test_nothing_outlives_kill_9(framework: Framework, tmp_path: Path) -> None:
    write(tmp_path, "stubborn.py", STUBBORN)
    (tmp_path / "tmp").mkdir()
    command = framework.local(2)
    env = {**variables(), "TMPDIR": str(tmp_path / "tmp")}
    with launched(command, "stubborn.py", framework.rank, folder=tmp_path, **env) as job:
        job.wait_for("ready", times=4)
        os.kill(job.pid, signal.SIGKILL)
        job.process.wait()
        job.nothing_left()


def test_output_of_any_kind_is_complete(framework: Framework, tmp_path: Path) -> None:
    prints(framework, tmp_path, processes=2, long=10_000_000, lines=50_000)


def prints(framework: Framework, folder: Path, *, processes: int, long: int, lines: int) -> None:
    write(folder, "prints.py", PRINTS)
    with start(framework, folder, processes, f"prints.py {long} {lines}") as job:
        assert job.wait() == 0, job.err
    assert job.err_bytes_lines() == [b"[rank=%d] to stderr" % rank for rank in range(processes)]
    assert_all_was_printed(job.out_bytes, ranks=processes, long=long, lines=lines)


def test_horovodrun_options_tune_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    names = ("CYCLE_TIME", "FUSION_THRESHOLD", "GLOO_TIMEOUT_SECONDS", "GLOO_IFACE")
    write(tmp_path, "says.py", f"import os; print(*(os.environ['HOROVOD_' + name] for name in {names}))")
    options = ["--cycle-time-ms", "3.5", "--fusion-threshold-mb", "32", "--network-interface", "eth7", "--"]
    command = FRAMEWORKS["horovod"].local(2)
    with launched(command, *options, "says.py", folder=tmp_path, **variables()) as job:
        assert job.wait() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[rank={rank}] 3.5 {32 << 20} 240 eth7" for rank in range(2)]
    with launched(command, "--no-such", "--", "says.py", folder=tmp_path, **variables()) as job:
        assert job.wait() == 2
    assert re.fullmatch(r"\[launcher\] .*--no-such.*\n", job.err), job.err


@pytest.mark.parametrize("name", ["torch_distributed", "deepspeed"])
def test_port_in_use_is_one_line(tmp_path: Path, name: str) -> None:
    write(tmp_path, "ok.py", "print('ran')")
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = str(used.getsockname()[1])
        place = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
        command = FRAMEWORKS[name].launcher(*place, "--nproc-per-node", "1")
        with launched(command, "ok.py", folder=tmp_path, **variables()) as job:
            assert job.wait() == 1, job.err
    (line,) = [line for line in job.err.splitlines() if line.startswith("[launcher] ")]
    assert re.search(r"in use|EADDRINUSE", line) and port in line, job.err
