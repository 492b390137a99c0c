"""Signals, grace period, exit status and leftovers of ranks on one node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from det_core._standalone.stop_signals import SAME_INTERRUPT
from support import nest
from support.frameworks import PRINTS, assert_all_was_printed
from support.launcher import TORCH, launched, write
from support.processes import suspend, until

COUNTS = """
    import os, signal, sys, time
    got = []
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(s, lambda n, f: got.append(n))
    print("ready", os.getpid(), flush=True)
    while not [n for n in got if n != signal.SIGUSR1]:
        time.sleep(0.01)
    time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0.7)  # a second one would come now
    print("got", *[signal.Signals(n).name for n in got])
"""
STUBBORN = """
    import os, signal, subprocess, sys, time
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda n, f: print("received", n))
    if os.fork() == 0:
        time.sleep(600)  # as a worker of a DataLoader does, in the same process group
    print("ready", os.getpid(), flush=True)
    while True:
        time.sleep(1)
"""
FAILS = """
    import os, sys, time
    rank = int(os.environ["RANK"])
    print("ready", flush=True)
    while not os.path.exists("go" if rank == 1 else "found out"):
        time.sleep(0.02)
    if rank == 1:
        for i in range(30):
            print("line", i)
        sys.exit("rank 1 has had enough")
    sys.exit(4)
"""


LEAVES = """
    import os, sys, time
    print("starts", flush=True)
    for leaves in range(2):
        if os.fork() == 0:
            if leaves:
                os.setsid()
            time.sleep(600)
    print("ends", flush=True)
    time.sleep(0 if sys.argv[1:] else 600)
"""


def ranks(count: int, *options: str) -> list[str]:
    """Return the command, without its script, that starts ``count`` ranks."""
    return [*TORCH, *options, "--nproc-per-node", str(count)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_reaches_each_script_once_and_all_may_save(tmp_path: Path, signum: signal.Signals) -> None:
    script = write(tmp_path, "counts.py", COUNTS)
    with launched(ranks(3), script, folder=tmp_path, RANK="7") as job:
        job.wait_for(r"ready (\d+)", times=3)
        os.kill(job.pid, signum)
        assert job.wait() == 0
        job.nothing_left()
    assert sorted(line for line in job.out.splitlines() if "got" in line) == [
        f"[rank={rank}] got {signum.name}" for rank in range(3)
    ]
    assert f"[launcher] {signum.name} forwarded to 3 ranks; grace period 60 s" in job.err


def test_sigusr1_is_forwarded_without_a_grace_period(tmp_path: Path) -> None:
    script = write(tmp_path, "counts.py", COUNTS)
    with launched(ranks(2, "--grace", "0.2"), script, "600", folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        os.kill(job.pid, signal.SIGUSR1)
        job.wait_for("SIGUSR1 forwarded to 2 ranks")
        time.sleep(0.6)
        assert job.process.poll() is None
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGKILL
    assert "killing rank" in job.err


def test_script_is_killed_with_its_children_after_the_grace_period(tmp_path: Path) -> None:
    script = write(tmp_path, "stubborn.py", STUBBORN)
    with launched(ranks(2, "--grace", "1"), script, folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        began = time.monotonic()
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGKILL
        assert time.monotonic() - began >= 1
        job.nothing_left()
    assert len(re.findall(r"\[launcher\] killing rank [01] \(pid \d+\), which still runs", job.err)) == 2


def test_third_ctrl_c_kills(tmp_path: Path) -> None:
    script = write(tmp_path, "stubborn.py", STUBBORN)
    with launched(ranks(2), script, folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        for count in (1, 2):
            os.kill(job.pid, signal.SIGINT)
            job.wait_for("received 2", times=2 * count)
            time.sleep(SAME_INTERRUPT)
        os.kill(job.pid, signal.SIGINT)
        assert job.wait() == 128 + signal.SIGKILL
    assert job.out.count("received 2") == 4


def test_ctrl_c_at_a_terminal_reaches_each_script_once(tmp_path: Path) -> None:
    script = write(tmp_path, "counts.py", COUNTS)
    with at_terminal(ranks(2), script) as (pid, terminal):
        seen = read_until(terminal, rb"ready(.|\s)*ready")
        os.write(terminal, b"\x03")
        seen += read_until(terminal, rb"got(.|\s)*got.*\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert re.findall(rb"got ([A-Z ]+)", seen) == [b"SIGINT", b"SIGINT"]


def test_prompts_at_a_terminal_are_shown_and_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("hello", input("who is there? "))
            breakpoint()
            open("asked", "w").close()
        else:
            while not os.path.exists("asked"):
                time.sleep(0.02)
            print("the other one")
    """
    monkeypatch.chdir(tmp_path)
    with at_terminal(ranks(2), write(tmp_path, "asks.py", script)) as (pid, terminal):
        seen = read_until(terminal, rb"who is there\? ")
        os.write(terminal, b"me\n")
        seen += read_until(terminal, rb"\(Pdb\) ")
        os.write(terminal, b"continue\n")
        seen += read_until(terminal, rb"the other one\r\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lines = seen.replace(b"\r", b"").splitlines()
    assert lines[:2] == [b"[rank=0] who is there? me", b"[rank=0] hello me"], seen
    assert [line for line in lines if line.endswith(b"(Pdb) continue")] == [b"[rank=0] (Pdb) continue"], seen
    assert lines[-1] == b"[rank=1] the other one", seen


@contextmanager
def at_terminal(launcher: list[str], *words: str) -> Iterator[tuple[int, int]]:
    """Start a launcher at a terminal of its own; yield its process ID and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execv(sys.executable, [*launcher, *words])
        finally:
            os._exit(99)
    try:
        yield pid, terminal
    finally:
        os.close(terminal)


def read_until(terminal: int, pattern: bytes) -> bytes:
    """Read until ``pattern`` has come."""
    seen = b""
    while not re.search(pattern, seen):
        seen += os.read(terminal, 1024)
    return seen


def test_script_without_handlers_ends_by_the_signal(tmp_path: Path) -> None:
    with launched(ranks(2), "sh", "-c", "echo ready; exec sleep 100", folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    line = "[launcher] ranks 0, 1 ended by SIGTERM, which has no handler before the first should_preempt() call"
    assert job.err.splitlines()[-1] == line


def test_signals_during_the_start_are_not_lost(tmp_path: Path) -> None:
    script = write(tmp_path, "counts.py", COUNTS)
    for moment in range(0, 12, 2):
        with launched(ranks(2, "--grace", "20"), script, folder=tmp_path) as job:
            time.sleep(moment * 0.03)
            os.kill(job.pid, signal.SIGTERM)
            status = job.wait()
        assert status in (0, 143, -signal.SIGTERM), job.err
        assert status == 0 or job.out.count("got") < 2


def test_first_failure_gives_the_status_and_its_last_lines(tmp_path: Path) -> None:
    script = write(tmp_path, "fails.py", FAILS)
    (tmp_path / "tmp").mkdir()
    with launched(ranks(3, "--tail", "3"), script, folder=tmp_path, TMPDIR=str(tmp_path / "tmp")) as job:
        job.wait_for("ready", times=3)
        began = time.monotonic()
        (tmp_path / "go").touch()
        assert job.wait() == 1
        assert time.monotonic() - began > 4, "the others get some seconds to find out by themselves"
    at_once, _, last = job.err[job.err.index("[launcher]") :].partition("\n")
    assert re.fullmatch(r"\[launcher\] rank 1 \(.*\) failed with status 1; 60 s for 2 other ranks to end", at_once)
    end = last.splitlines()
    assert re.fullmatch(
        r"\[launcher\] rank 1 \(pid \d+, host \S+\) failed first, with status 1; its last lines:", end[0]
    )
    assert end[1:4] == ["[rank=1] line 28", "[rank=1] line 29", "[rank=1] rank 1 has had enough"]
    assert sorted(line.split(" (")[0] for line in end[4:]) == ["[launcher] rank 0", "[launcher] rank 2"]
    assert list((tmp_path / "tmp").iterdir()) == [], "no file is left behind"


def test_rank_that_ignores_sigterm_after_a_failure_is_named(tmp_path: Path) -> None:
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready", flush=True)
        if os.environ["RANK"] == "0":
            raise SystemExit(7)
        time.sleep(600)
    """
    with launched(ranks(2, "--grace", "600"), write(tmp_path, "stubborn.py", script), folder=tmp_path) as job:
        job.wait_for(r"rank 0 \(.*\) failed with status 7; 600 s for 1 other rank to end")
        job.wait_for(r"still running 5 s after SIGTERM: rank 1 \(pid \d+\); .* killing in 5\d\d s")
        while job.process.poll() is None:  # three, that the launcher has seen more than a second apart
            os.kill(job.pid, signal.SIGINT)
            time.sleep(1.5 * SAME_INTERRUPT)
        assert job.wait() == 7
        assert re.search(r"rank 1 \(.*\) was killed by the launcher", job.err) and "within the grace" not in job.err


@pytest.mark.parametrize("words", [["torch_distributed", "train.py"], ["wrap_rank", "0", "train.py"]])
def test_deleted_working_directory_is_one_line(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "gone").mkdir()
    command = 'cd gone && rmdir "$PWD" && exec "$@"'
    absolute = filter(os.path.isabs, sys.path)  # an editable install adds the name of a hook, and '' is this folder
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(absolute)}
    python = [sys.executable, "-P", "-m", f"det_core.launch.{words[0]}", *words[1:]]
    done = subprocess.run(["sh", "-c", command, "sh", *python], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"\[launcher\] the working directory was deleted or .*\n", done.stderr), done.stderr


def test_scripts_that_notice_a_failure_end_before_any_signal(tmp_path: Path) -> None:
    script = write(tmp_path, "fails.py", FAILS)
    with launched(ranks(3), script, folder=tmp_path) as job:
        (tmp_path / "go").touch()
        job.wait_for(r"rank 1 \(.*\) failed with status 1; 60 s for 2 other ranks to end")
        (tmp_path / "found out").touch()
        assert job.wait() == 1
    assert job.err.count("with status 4") == 2


@pytest.mark.parametrize("victim", ["launcher", "supervisor", "script"])
def test_nothing_outlives_a_kill(tmp_path: Path, victim: str) -> None:
    script = write(tmp_path, "stubborn.py", STUBBORN)
    with launched(ranks(2, "--grace", "1"), script, folder=tmp_path) as job:
        scripts = [int(pid) for pid in job.wait_for(r"ready (\d+)", times=2)]
        assert len(job.processes()) == 2 + 4, "launcher and supervisor; two scripts with a child each"
        pid = {"launcher": job.pid, "supervisor": job.supervisor(), "script": scripts[0]}[victim]
        os.kill(pid, signal.SIGKILL)
        if victim == "launcher":
            job.process.wait()
        else:
            assert job.wait() == 128 + signal.SIGKILL
        job.nothing_left()
    if victim == "supervisor":
        assert f"[launcher] the supervisor (pid {pid}) was killed by SIGKILL\n" in job.err


@pytest.mark.parametrize("by", ["cmdline", "comm"])
def test_nothing_outlives_a_kill_of_all_that_a_name_matches(tmp_path: Path, by: str) -> None:
    """``pkill -9 -f named.py`` and ``pkill -9 python`` match launcher and ranks at once."""
    script = """
        import subprocess
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("ready", flush=True)
        subprocess.run(["sleep", "600"])
    """
    name = {"cmdline": "named.py", "comm": "python"}[by]
    with launched(ranks(2), write(tmp_path, "named.py", script), folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        until(lambda: len(job.processes()) == 2 + 6)
        matched = [pid for pid in job.processes() if name in Path(f"/proc/{pid}/{by}").read_text()]
        assert job.pid in matched and len(matched) == 1 + 2, job.processes()
        for pid in matched:
            with contextlib.suppress(ProcessLookupError):  # the launcher's end may have ended it
                os.kill(pid, signal.SIGKILL)
        job.process.wait()
        job.nothing_left()


def test_nothing_outlives_a_kill_at_any_moment(tmp_path: Path) -> None:
    kill_at_any_moment(tmp_path, random.Random(38), times=8)


def kill_at_any_moment(folder: Path, moments: random.Random, times: int) -> None:
    """End launcher or supervisor while scripts fork and leave daemons."""
    script = write(folder, "leaves.py", LEAVES)
    ways = [(signum, victim) for signum in (signal.SIGKILL, signal.SIGTERM) for victim in ("launcher", "supervisor")]
    for number in range(times):
        signum, victim = ways[number % len(ways)]
        with launched(ranks(2, "--grace", "0.2"), script, folder=folder) as job:
            time.sleep(moments.uniform(0, 0.4))
            there = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            os.kill(int(there[0]) if victim == "supervisor" and there else job.pid, signum)
            job.nothing_left()


def test_daemon_that_holds_the_output_ends_with_the_job(tmp_path: Path) -> None:
    script = write(tmp_path, "leaves.py", LEAVES)
    with launched(ranks(1), script, "and ends", folder=tmp_path) as job:
        assert job.wait() == 0
        job.nothing_left()
    assert "[rank=0] ends\n" in job.out


def test_command_that_cannot_run_reports_why(tmp_path: Path) -> None:
    path = write(tmp_path, "bad", "#!/nowhere/python\n")
    os.chmod(path, 0o755)
    with launched(ranks(1), path, folder=tmp_path) as job:
        assert job.wait() == 127
    assert f"[rank=0] cannot run {path}: No such file or directory\n" in job.err


def test_output_of_any_kind_is_complete(tmp_path: Path) -> None:
    script = write(tmp_path, "prints.py", PRINTS)
    words = [script, "RANK", "10000000", "50000"]
    with launched(ranks(4), *words, folder=tmp_path) as job:
        assert job.wait() == 0
    assert job.err_bytes_lines() == [b"[rank=%d] to stderr" % rank for rank in range(4)]
    assert_all_was_printed(job.out_bytes, ranks=4, long=10_000_000, lines=50_000)


def test_stopped_reader_does_not_delay_signals(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    words = [sys.executable, "-c", "while True: print('x' * 1000, flush=True)"]
    with launched(ranks(2, "--grace", "2"), *words, folder=tmp_path, stdout=write_end) as job:
        os.close(write_end)
        until(lambda: unread(read) > 60_000, of=job.process)  # the pipe is full now, and all before it will be
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
        job.nothing_left()
    os.close(read)


def unread(pipe: int) -> int:
    """Return the number of unread bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


def test_job_under_nohup_survives_a_hang_up(tmp_path: Path) -> None:
    script = write(tmp_path, "counts.py", COUNTS)
    with launched(["nohup", *ranks(1)], script, folder=tmp_path) as job:
        job.wait_for("ready")
        os.kill(job.pid, signal.SIGHUP)
        time.sleep(0.3)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 0
    assert "got SIGTERM\n" in job.out


def test_closed_standard_streams_do_no_harm(tmp_path: Path) -> None:
    script = write(tmp_path, "ok.py", "open('ran', 'w').close()")
    command = " ".join(["exec", *ranks(1), script, ">&-", "2>&-", "<&-"])
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path).returncode == 0
    assert (tmp_path / "ran").exists()


def test_full_stderr_does_not_change_the_status(tmp_path: Path) -> None:
    command = " ".join(["exec", *ranks(2), "sh", "-c", "'exit 7'", "2>", "/dev/full"])
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path).returncode == 7


def test_script_inherits_only_its_three_descriptors(tmp_path: Path) -> None:
    with launched(ranks(2), "sh", "-c", "echo fds /proc/self/fd/*", folder=tmp_path) as job:
        assert job.wait() == 0
    for line in job.out.splitlines():
        assert {int(path.rsplit("/", 1)[1]) for path in line.split()[2:]} <= {0, 1, 2, 3}, "3 is the one to list them"


def test_stopped_supervisor_does_not_keep_the_job_alive(tmp_path: Path) -> None:
    script = write(tmp_path, "stubborn.py", STUBBORN)
    with launched(ranks(2, "--grace", "0.5"), script, folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        suspend(job.supervisor())
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGKILL
        job.nothing_left()


def test_stopped_reader_does_not_keep_the_launcher_alive(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    with launched(ranks(1), sys.executable, "-c", "print('x' * 500_000)", folder=tmp_path, stdout=write_end) as job:
        os.close(write_end)
        until(lambda: unread(read) > 60_000 and not nest.children_of(job.supervisor()), of=job.process)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 0
    os.close(read)


@pytest.mark.parametrize(("count", "policy"), [(1, os.SCHED_OTHER), (2, os.SCHED_BATCH)])
def test_ranks_that_fill_the_processors_get_the_batch_class(tmp_path: Path, count: int, policy: int) -> None:
    command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *ranks(count)]
    code = "import os; print('policy', os.sched_getscheduler(0))"
    with launched(command, sys.executable, "-c", code, folder=tmp_path, CUDA_VISIBLE_DEVICES="") as job:
        assert job.wait() == 0
    assert job.out.count(f"policy {policy}\n") == count
