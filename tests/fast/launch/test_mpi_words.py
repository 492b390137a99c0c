"""What the mpi launcher makes of a command line, without mpirun; and itself as one rank of somebody's mpirun."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from support.launcher import launched, write

MPI = [sys.executable, "-m", "det_core.launch.mpi"]
ARGUMENTS = """\
#!/bin/sh
printf '%s\\n' "$@" > arguments
env > variables
"""
"""An mpirun that only writes down how it was called."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text(ARGUMENTS)
    os.chmod(tmp_path / "bin" / "mpirun", 0o755)
    write(tmp_path, "s.py", "print('ran')")
    return f"{tmp_path}/bin:/usr/bin:/bin"


def test_the_command_line_of_mpirun(tmp_path: Path, path: str) -> None:
    words = ["-np", "3", "--grace", "7", "--mca", "btl", "self", "--", "s.py", "--", "-np", "9"]
    with launched(MPI, *words, folder=tmp_path, PATH=path) as job:
        assert job.wait() == 1, "it starts no rank"
    given = (tmp_path / "arguments").read_text().splitlines()
    assert given[given.index("-np") + 1] == "3"
    assert ("--allow-run-as-root" in given) == (os.geteuid() == 0)
    assert given[given.index("odls_base_sigkill_timeout") + 1] == "12"
    script = given.index(sys.executable)
    assert given[script - 3 : script] == ["--mca", "btl", "self"]
    assert given[-5:] == [sys.executable, "s.py", "--", "-np", "9"]
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines() if "=" in line)
    assert len(variables["DET_CORE_SECRET"]) == 64
    assert variables["DET_CORE_COMMAND"].endswith("-- s.py -- -np 9")
    assert not [word for word in given if variables["DET_CORE_SECRET"] in word]
    assert re.search(r"\[launcher\] mpirun \(pid \d+\) ended with status 0", job.err), job.err


MEMBERS = [
    {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
    {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"},
]


@pytest.mark.parametrize("variables", MEMBERS, ids=["OMPI", "PMI"])
def test_as_one_rank_of_a_job_it_runs_the_script_alone(tmp_path: Path, variables: dict[str, str]) -> None:
    write(
        tmp_path,
        "waits.py",
        """
        import os, signal, time
        got = []
        signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
        print("ready", os.environ.get("DET_CORE_SECRET"), flush=True)
        while not got:
            time.sleep(0.01)
        print("got", len(got))
        """,
    )
    with launched(MPI, "--grace", "5", "waits.py", folder=tmp_path, **variables) as job:
        job.wait_for(r"\[rank=2\] ready None")
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 0, job.err
        job.nothing_left()
    assert "[rank=2] got 1\n" in job.out


def test_as_one_rank_on_one_of_several_machines_it_needs_the_jobs_secret(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "import os; print(os.environ['DET_CORE_SECRET'])")
    variables = {**MEMBERS[0], "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with launched(MPI, "s.py", folder=tmp_path, **variables) as job:
        assert job.wait() == 2
    assert re.search(r"^    export DET_CORE_SECRET=[0-9a-f]{64}$", job.err, re.MULTILINE)
    with launched(MPI, "s.py", folder=tmp_path, **variables, DET_CORE_SECRET="shared") as job:
        assert job.wait() == 0
    assert job.out == "[rank=2] shared\n"
