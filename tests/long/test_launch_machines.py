"""Launchers whose machines fall silent: last words that never come, a cable that is cut."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from support.frameworks import FRAMEWORKS, need
from support.hosts import Hosts, hosts
from support.launcher import launched, tests_of, write
from support.processes import until

__all__ = ["hosts"]
short = tests_of("test_two_machines")


def test_last_words_that_never_come_are_waited_for_a_minute(hosts: Hosts, tmp_path: Path) -> None:
    need(*FRAMEWORKS["mpi"].needs)
    script = write(tmp_path, "ends.py", short.ENDS)
    with launched(
        short.by_ssh(FRAMEWORKS["mpi"], hosts, "--grace", "2"), script, folder=tmp_path, **short.env(tmp_path)
    ) as job:
        job.wait_for("ready", times=4)
        (near,) = [pid for pid, command in hosts.processes(1).items() if "_near" in command and "_far" in command]
        os.kill(near, signal.SIGSTOP)
        try:
            (tmp_path / "go").touch()
            begun = time.monotonic()
            assert job.wait() == 1, job.err
            assert time.monotonic() - begun > 55
        finally:
            os.kill(near, signal.SIGCONT)
    assert "mpirun (pid" in job.err and "ended with status 0" in job.err, job.err
    hosts.nothing_left()


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_a_cut_cable_ends_all_on_both_sides(hosts: Hosts, tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    need(*framework.needs)
    script = write(tmp_path, "waits.py", short.WAITS)
    try:
        with launched(
            short.by_ssh(framework, hosts, "--grace", "5"), script, folder=tmp_path, **short.env(tmp_path)
        ) as job:
            job.wait_for("ready", times=4)
            hosts.cut()
            assert job.wait() != 0, job.err
            assert "the connection to its machine" in job.err
            until(lambda: not [command for command in hosts.processes(2).values() if script in command])
    finally:
        hosts.mend()
    hosts.nothing_left()
