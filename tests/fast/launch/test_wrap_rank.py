"""``wrap_rank``: one script with its rank before every line. No framework stands in between, so all of it is real."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from det_core.launch import wrap_rank
from support.launcher import launched, write

WRAP = [sys.executable, "-m", "det_core.launch.wrap_rank"]
STUBBORN = """
    import os, signal, time
    signal.signal(signal.SIGTERM, lambda n, f: print("received", n, flush=True))
    os.fork()
    print("ready", os.getpid(), flush=True)
    while True:
        time.sleep(0.1)
"""


def test_rank_of_takes_a_number_or_the_first_set_variable(tmp_path: Path) -> None:
    write(tmp_path, "says.py", "import sys; print(*sys.argv[1:]); print('err', file=sys.stderr)")
    with launched(WRAP, "3", "says.py", "--", "a b", folder=tmp_path) as job:
        assert job.wait() == 0
    assert (job.out, job.err) == ("[rank=3] -- a b\n", "[rank=3] err\n")
    words = ["NOT_SET,SECOND,THIRD", "--", sys.executable, "says.py", "x"]
    with launched(WRAP, "--no-redirect-stdio", *words, folder=tmp_path, SECOND="5", THIRD="6") as job:
        assert job.wait() == 0
    assert job.out == "[rank=5] x\n"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 1, "no script to run"),
        (["3"], 1, "no script to run"),
        (["3", "--"], 1, "no script to run"),
        (["NOT_SET,NOR_THIS", "echo"], 1, "none of NOT_SET,NOR_THIS is set to a number"),
        (["3", "nowhere.py"], 2, "nowhere.py does not exist"),
        (["--bad", "3", "echo"], 2, "unknown option: --bad"),
    ],
)
def test_invalid_command_line_is_one_line(
    capfd: pytest.CaptureFixture[str], words: list[str], status: int, message: str
) -> None:
    assert wrap_rank.main(words) == status
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("[launcher] ") and err.count("\n") == 1
    assert message in err


def test_help_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert wrap_rank.main(["--help"]) == 0
    assert "usage: python -m det_core.launch.wrap_rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("pass", 0)],
)
def test_exit_status_is_the_scripts(tmp_path: Path, code: str, status: int) -> None:
    with launched(WRAP, "0", sys.executable, "-c", code, folder=tmp_path) as job:
        assert job.wait() == status


def test_ranks_with_one_pipe_do_not_cut_each_others_lines(tmp_path: Path) -> None:
    code = "import os\nfor i in range(300): os.write(1, os.environ['R'].encode() * 9000 + b'\\n')"
    one = f'R=$r {sys.executable} -m det_core.launch.wrap_rank R {sys.executable} -c "$CODE" &'
    shell = ["sh", "-c", f"(for r in 1 2 3; do {one} done; wait) | cat"]
    with launched(shell, folder=tmp_path, CODE=code) as job:
        assert job.wait() == 0
    lines = job.out_bytes.splitlines()
    assert len(lines) == 900
    assert {line for line in lines} == {b"[rank=%d] " % r + b"%d" % r * 9000 for r in (1, 2, 3)}


def test_signals_are_forwarded(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "counts.py",
        """
        import signal, time
        got = []
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(s, lambda n, f: got.append(n))
        print("ready", flush=True)
        told = 0
        while signal.SIGTERM not in got[:told]:
            time.sleep(0.01)
            for n in got[told:]:
                told += 1
                print("got", signal.Signals(n).name, flush=True)
        """,
    )
    with launched(WRAP, "0", script, folder=tmp_path) as job:
        job.wait_for("ready")
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(job.pid, signum)
            job.wait_for(f"got {signum.name}")
        assert job.wait() == 0
    assert job.out.count("got") == 5, "once each"


def test_script_that_ignores_sigterm_ends_with_its_parent(tmp_path: Path) -> None:
    script = write(tmp_path, "stubborn.py", STUBBORN)
    parent = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    with launched([*parent, *WRAP], "0", script, folder=tmp_path) as job:
        job.wait_for("ready", times=2)
        wrapper = job.supervisor()  # the child of that parent
        os.kill(wrapper, signal.SIGTERM)
        job.wait_for("received 15")
        assert len(job.processes()) == 5, "the parent; launcher and supervisor; the script and its child"
        job.process.kill()
        job.nothing_left()


def test_killed_wrapper_ends_its_script(tmp_path: Path) -> None:
    script = write(tmp_path, "sleeps.py", "import time; print('ready', flush=True); time.sleep(600)")
    with launched(WRAP, "0", script, folder=tmp_path) as job:
        job.wait_for("ready")
        job.process.kill()
        job.nothing_left()


def test_cluster_files_receive_the_output_by_default(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").touch()
    main = f"from det_core.launch import wrap_rank as w; w.LOGS = {str(tmp_path)!r}; raise SystemExit(w.main())"
    command = [sys.executable, "-c", main]
    says = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"]
    with launched(command, "0", *says, folder=tmp_path) as job:
        assert job.wait() == 0
    assert (job.out, job.err) == ("", "[rank=0] err\n")
    with launched(command, "--no-redirect-stdio", "0", *says, folder=tmp_path) as job:
        assert job.wait() == 0
    assert (job.out, job.err) == ("[rank=0] out\n", "[rank=0] err\n")
    assert (tmp_path / "stdout.log").read_text() == "[rank=0] out\n"


def test_killed_process_group_ends_daemons(tmp_path: Path) -> None:
    body = "import os, time\nif os.fork() == 0: os.setsid()\nos.write(1, b'1\\n')\ntime.sleep(600)"
    script = write(tmp_path, "daemon.py", body)
    with launched(WRAP, "0", script, folder=tmp_path) as job:
        job.wait_for(r"\[rank=0\] 1", times=2)
        os.killpg(job.pid, signal.SIGKILL)  # as torchrun and mpirun do with what has not ended
        job.process.wait()
        job.nothing_left()


def test_closed_reader_ends_the_script(tmp_path: Path) -> None:
    shell = ["sh", "-c", f"{' '.join(WRAP)} 0 {sys.executable} -c 'while True: print(1)' | head -1"]
    with launched(shell, folder=tmp_path) as job:
        assert job.wait() == 0
        job.nothing_left()
    assert re.fullmatch(r"\[rank=0\] 1\n", job.out)
