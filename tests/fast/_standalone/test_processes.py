"""Processes that are ended with all they start; by programs of the standard library alone, as they are used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from det_core import _standalone
from det_core._standalone.processes import CannotRun, descendants, send, spawn, start_time
from support.processes import until

FOLDER = str(Path(_standalone.__file__).parents[1])
PROGRAM = """
import os, signal, sys, time
sys.path.append(sys.argv[1])
from _standalone import files, processes
processes.adopt_orphans()
"""
TREE = """
import os, time
for _ in range(2):
    os.fork()  # four processes
os.setsid() if os.getpid() != os.getsid(0) else None
os.fork()
os.write(1, b"%d\\n" % os.getpid())  # in one piece, as eight write to one pipe
time.sleep(600)
"""


def program(code: str, *words: str) -> subprocess.Popen[str]:
    """Start a program that has nothing but the standard library, and ours."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM + code, FOLDER, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read(process: subprocess.Popen[str], lines: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(lines)]


def gone(pids: list[str]) -> None:
    until(lambda: not [pid for pid in pids if start_time(int(pid))])


def test_it_loads_nothing_but_the_standard_library() -> None:
    with program("print(*{name.split('.')[0] for name in sys.modules})") as process:
        (line,) = read(process, 1)
    assert set(line.split()) <= {*sys.stdlib_module_names, "_standalone", "__main__"}


def test_all_that_was_started_below_ends_whatever_session_it_has_chosen() -> None:
    code = "processes.spawn([sys.executable, '-c', sys.argv[2]], dict(os.environ)); sys.stdin.readline()\n"
    code += "processes.end_descendants(); print('ended', processes.descendants())"
    command = [sys.executable, "-I", "-S", "-c", PROGRAM + code, FOLDER, TREE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        pids = read(process, 8)
        assert len(set(pids)) == 8 and all(start_time(int(pid)) for pid in pids)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert read(process, 1) == ["ended set()"]
        gone(pids)


def test_what_ends_by_itself_in_time_is_not_killed() -> None:
    script = "import os, time\nif os.fork() == 0:\n    time.sleep(0.1); print('cleaned up', flush=True)"
    code = "processes.spawn([sys.executable, '-c', sys.argv[2]], dict(os.environ)); processes.end_descendants(60)"
    with program(code, script) as process:
        assert read(process, 2) == ["cleaned up", ""]


def test_a_child_dies_with_the_one_that_started_it() -> None:
    code = "print(processes.spawn(['sleep', '600'], dict(os.environ)), flush=True); time.sleep(600)"
    with program(code) as process:
        pids = read(process, 1)
        process.kill()
    gone(pids)


def test_a_child_has_a_session_of_its_own_and_the_signals_it_is_given() -> None:
    says = "import os, signal; print(os.getsid(0) == os.getpid(), signal.pthread_sigmask(0, []) == {signal.SIGUSR1})"
    code = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    code += "processes.spawn([sys.executable, '-c', sys.argv[2]], dict(os.environ), mask=[signal.SIGUSR1])\nos.wait()"
    with program(code, says) as process:
        assert read(process, 1) == ["True True"]


@pytest.mark.parametrize(("mode", "status"), [(None, 127), (0o644, 126)])
def test_what_cannot_be_run_has_the_status_that_a_shell_gives(tmp_path: Path, mode: int | None, status: int) -> None:
    if mode is not None:
        (tmp_path / "program").touch(mode)
    with pytest.raises(CannotRun, match=r"cannot run .*/program") as error:
        spawn([str(tmp_path / "program")], {})
    assert error.value.status == status


def test_a_process_is_known_by_its_id_and_when_it_started() -> None:
    child = subprocess.Popen(["sleep", "600"])
    began = start_time(child.pid)
    assert began and began == start_time(child.pid) and began >= (start_time(os.getpid()) or 0)
    assert child.pid in descendants()
    assert send(child.pid, signal.SIGKILL)
    until(lambda: start_time(child.pid) is None)  # a zombie does not run
    child.wait()
    assert not send(child.pid, signal.SIGTERM)
    assert start_time(child.pid) is None


def test_children_that_have_ended_are_collected_each_with_its_status() -> None:
    code = "pids = [processes.spawn(['sh', '-c', f'exit {n}'], dict(os.environ)) for n in (3, 0)]\n"
    code += "found = {}\nwhile (ended := processes.reap()) is not None: found |= ended; time.sleep(0.01)\n"
    code += "print([os.waitstatus_to_exitcode(found[pid]) for pid in pids])"
    with program(code) as process:
        assert read(process, 1) == ["[3, 0]"]
