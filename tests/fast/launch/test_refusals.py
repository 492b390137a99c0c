"""Refused command lines: one line that names the word, and a status."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from support import ROOT, warm
from support.launcher import write

REFUSED = {  # test_cli.py tests the parser that all share
    "torch_distributed": {
        "": "no script to run",
        "nowhere.py": "nowhere.py does not exist",
        "--nproc-per-node 0 s.py": "--nproc-per-node 0",
        "--nproc-per-node some s.py": "--nproc-per-node some",
        "--nnodes 0 s.py": "--nnodes 0",
        "--bad-option s.py": "--bad-option",
        "--grace soon s.py": "--grace",
    },
    "deepspeed": {
        "": "no script to run",
        "--num_gpus 0 s.py": "--num_gpus 0: expected",
        "-H hosts s.py": "hosts:2: expected node2 slots=N",
        "--nnodes 2 s.py": "--node-rank R",
        "--bind_cores_to_rank s.py": "unknown option: --bind_cores_to_rank",
        "-- --trial": "--trial: expected MODULE:CLASS",
    },
    "horovod": {
        "": "no script to run",
        "-np 0 s.py": "-np",
        "--cycle-time-ms 3 s.py": "an option of horovodrun needs a -- before the script",
        "--hosts localhost:2,:3 s.py": "--hosts localhost:2,:3",
        "--hostfile hosts s.py": "hosts:2: expected node2 slots=N, found 'node2 slot=2'",
        "--hostfile nowhere s.py": "hostfile nowhere: No such file or directory",
        "--hosts localhost:1 -np 2 s.py": "-np 2: --hosts localhost:1 has 1 slot",
        "--nnodes 2 --node-rank 0 --master-addr a s.py": "--hosts A:2,B:2",
    },
    "tensorflow": {
        "": "no script to run",
        "--nproc-per-node 2 s.py": "one process on each node",
        "--hostfile hosts s.py": "hosts:2: expected node2 slots=N",
        "--nnodes 2 --node-rank 0 --master-addr a s.py": "--hosts A,B",
        "--fast -- s.py": "unknown option: --fast",
        "--trial module:Class": "trial classes run under torch_distributed, horovod, deepspeed, not under tensorflow",
    },
}
SECRET = "a secret of two machines"
HELP = {
    "torch_distributed": ["--grace SECONDS", "--launcher-port PORT", "torchrun --max-restarts 3"],
    "deepspeed": ["--num_gpus"],
    "horovod": ["--autohorovod"],
    "tensorflow": ["--port P"],
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """Write a script, and a hostfile with an invalid line."""
    write(tmp_path, "s.py", "print('ran')")
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slot=2\n")


def launch(name: str, line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher that starts no rank, and return its result."""
    return warm.run(["-m", f"det_core.launch.{name}", *line.split()], env={**os.environ, **env}, cwd=folder)


def one_line(done: subprocess.CompletedProcess[str], status: int, text: str) -> None:
    assert done.returncode == status, done.stdout
    assert done.stdout.startswith("[launcher] ") and done.stdout.count("\n") == 1, done.stdout
    assert re.search(text, done.stdout), done.stdout


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_command_line_is_one_line_and_status_2(tmp_path: Path, name: str) -> None:
    for line, text in REFUSED[name].items():
        one_line(launch(name, line, tmp_path, DET_CORE_SECRET=SECRET), 2, re.escape(text))


def test_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        two = f"--hosts 127.0.0.1,127.0.0.2 --node-rank 0 --port {port} s.py"
        one_line(launch("tensorflow", two, tmp_path), 1, f"port {port} is in use")
        one = f"--nproc-per-node 1 --master-port {port} s.py"
        one_line(launch("torch_distributed", one, tmp_path), 1, f"port {port} is in use")


@pytest.mark.parametrize("name", HELP)
def test_help_shows_usage_and_options(tmp_path: Path, name: str) -> None:
    done = launch(name, "--help", tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m det_core.launch.{name}"), done.stdout
    assert [text for text in HELP[name] if text not in done.stdout] == []


def test_help_among_options_works_in_the_repository() -> None:
    done = launch("torch_distributed", "--standalone -h", ROOT)
    assert done.returncode == 0 and "--launcher-port" in done.stdout, done.stdout


def test_invalid_grace_variable_is_one_line(tmp_path: Path) -> None:
    one_line(launch("torch_distributed", "s.py", tmp_path, DET_CORE_GRACE="abc"), 2, "DET_CORE_GRACE")


def test_unknown_master_addr_is_one_line(tmp_path: Path) -> None:
    line = "--nnodes 2 --node-rank 1 --master-addr no-such-host.invalid s.py"
    one_line(launch("torch_distributed", line, tmp_path), 1, r"cannot reach host no-such-host\.invalid from")
