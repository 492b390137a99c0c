"""A launcher that has become a framework's own program, which knows nothing of us and is harsh to its ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from support import TESTS
from support.launcher import launched, write

PROGRAM = [sys.executable, str(TESTS / "support" / "plain_program.py")]
SAVES = """
    import os, signal, sys, time
    got = []
    signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
    print("ready", os.getpid(), flush=True)
    if os.environ["RANK"] == "1" and "fails" in sys.argv:
        time.sleep(0.5)
        print("this is the end")
        sys.exit(3)
    while not got:
        time.sleep(0.01)
    time.sleep(0.7)  # a second one would come now
    print("saved after", len(got))
"""
STUBBORN = """
    import os, signal, time
    signal.signal(signal.SIGTERM, lambda n, f: None)
    print("ready", os.getpid(), flush=True)
    os.fork()
    while True:
        time.sleep(0.1)
"""


def run(ranks: int, *words: str) -> list[str]:
    return [*PROGRAM, "--nproc-per-node", str(ranks), *words]


def test_the_ranks_are_seen_and_the_program_is_not(tmp_path: Path) -> None:
    script = write(tmp_path, "s.py", "import os, sys; print('a', os.environ['RANK']); print('b', file=sys.stderr)")
    with launched(run(2), script, folder=tmp_path) as job:
        assert job.wait() == 0
    assert sorted(job.out.splitlines()) == ["[rank=0] a 0", "[rank=1] a 1"]
    assert sorted(job.err.splitlines()) == ["[rank=0] b", "[rank=1] b"]
    with launched(run(1, "--verbose"), script, folder=tmp_path) as job:
        assert job.wait() == 0
    assert "the program says hello" in job.out.splitlines()


def test_a_signal_reaches_each_script_once_and_the_program_never(tmp_path: Path) -> None:
    write(tmp_path, "saves.py", SAVES)
    with launched(run(3), "saves.py", folder=tmp_path) as job:
        job.wait_for("ready", times=3)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 0
        job.nothing_left()
    assert job.out.count("saved after 1\n") == 3
    assert job.err == "[launcher] SIGTERM: passed on to 3 ranks, which have 60 s to save and exit\n"


def test_when_a_rank_fails_the_others_save_before_the_program_hears_of_it(tmp_path: Path) -> None:
    write(tmp_path, "saves.py", SAVES)
    with launched(run(3, "--grace", "4"), "saves.py", "fails", folder=tmp_path) as job:
        assert job.wait() == 3
    assert job.out.count("saved after 1\n") == 2
    assert re.fullmatch(
        r"\[launcher\] rank 1 \(pid \d+, host \S+\) failed first, with status 3; its last lines:\n"
        r"\[rank=1\] ready \d+\n\[rank=1\] this is the end\n",
        job.err,
    ), job.err


def test_a_rank_that_was_killed_is_a_failure_too(tmp_path: Path) -> None:
    write(tmp_path, "saves.py", SAVES)
    with launched(run(2, "--grace", "4"), "saves.py", folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        os.kill(int(re.findall(r"\[rank=0\] ready (\d+)", job.out)[0]), signal.SIGKILL)
        assert job.wait() == 128 + signal.SIGKILL
    assert job.out.count("saved after 1\n") == 1
    assert "failed first, killed by SIGKILL" in job.err


@pytest.mark.parametrize("reason", ["SIGTERM", "failure"])
def test_what_does_not_end_is_killed_after_the_grace(tmp_path: Path, reason: str) -> None:
    write(tmp_path, "stubborn.py", STUBBORN)
    with launched(run(2, "--grace", "1"), "stubborn.py", folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        began = time.monotonic()
        if reason == "SIGTERM":
            os.kill(job.pid, signal.SIGTERM)
        else:
            os.kill(int(re.findall(r"\[rank=0\] ready (\d+)", job.out)[0]), signal.SIGKILL)
        assert job.wait() == 128 + signal.SIGKILL
        assert time.monotonic() - began >= 1
        job.nothing_left()


@pytest.mark.parametrize("victim", ["launcher", "program", "wrapper"])
def test_nothing_outlives_a_kill(tmp_path: Path, victim: str) -> None:
    write(tmp_path, "stubborn.py", STUBBORN)
    with launched(run(2, "--grace", "1", "--leaves"), "--", "stubborn.py", folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        (program,) = (pid for pid, command in job.processes().items() if "plain_program.py program" in command)
        wrapper = next(pid for pid in job.wrappers() if pid != program)
        os.kill({"launcher": job.pid, "program": program, "wrapper": wrapper}[victim], signal.SIGKILL)
        status = {"launcher": -signal.SIGKILL, "program": 1, "wrapper": 128 + signal.SIGKILL}[victim]
        assert job.wait() == status
        job.nothing_left()


def test_what_the_program_leaves_behind_ends_with_the_job(tmp_path: Path) -> None:
    script = write(tmp_path, "ok.py", "pass")
    with launched(run(2, "--leaves"), "--", script, folder=tmp_path) as job:
        assert job.wait() == 0
        job.nothing_left()


def test_a_program_that_does_not_end_with_its_ranks_is_ended(tmp_path: Path) -> None:
    script = write(tmp_path, "ok.py", "pass")
    with launched(run(2, "--stays"), "--", script, folder=tmp_path) as job:
        assert job.wait() == 0
        job.nothing_left()


def test_a_program_that_starts_nothing_says_why(tmp_path: Path) -> None:
    script = write(tmp_path, "ok.py", "pass")
    with launched(run(2, "--breaks"), "--", script, folder=tmp_path) as job:
        assert job.wait() == 1
    assert re.fullmatch(
        r"the program says hello\nthe program lost its way\n"
        r"\[launcher\] the plain program \(pid \d+\) ended with status 3\n",
        job.err,
    ), job.err
