"""Launchers and plain scripts in jobs of a real Slurm, on two machines."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frameworks import FRAMEWORKS, PYTHON, Framework, everyone_is_right, variables
from support.hosts import SECRET, Hosts
from support.launcher import launched, write
from support.slurm import Slurm

TORCH = FRAMEWORKS["torch_distributed"]
PLAIN = Framework("srun", context="distributed = core.DistributedContext.from_slurm()", rank="SLURM_PROCID", size="-n")
SAVES = """
    import os, signal, sys, time
    got = []
    signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
    print("ready", os.getpid(), flush=True)
    while not got:
        time.sleep(0.01)
    time.sleep(3)
    open(f"saved-{os.environ['RANK']}", "w").close()
"""


@pytest.fixture(autouse=True)
def nothing_is_left(hosts: Hosts, slurm: Slurm) -> Iterator[None]:
    """Check after each test that nothing but servers runs on either machine."""
    yield
    slurm.cancel()
    hosts.nothing_left()


def env(folder: Path, **more: str) -> dict[str, str]:
    return {**variables(), "GLOO_SOCKET_IFNAME": "eth0", "HOME": str(folder), "DET_CORE_SECRET": SECRET, **more}


@pytest.mark.parametrize("name", ["horovod", "deepspeed"])
def test_launcher_on_each_node_numbers_its_ranks(slurm: Slurm, tmp_path: Path, name: str) -> None:
    """That of torch_distributed does so in the other tests here."""
    framework = FRAMEWORKS[name]
    command = slurm.srun("-N2", "-n2", "--cpus-per-task=2", *framework.launcher("--nproc-per-node", "2"))
    with launched(command, framework.who(tmp_path), folder=tmp_path, **env(tmp_path)) as job:
        assert job.wait() == 0, job.err + slurm.log()
    everyone_is_right(job.out)


def test_batch_job_runs_all_ranks(slurm: Slurm, tmp_path: Path) -> None:
    launcher = " ".join(TORCH.launcher("--nproc-per-node", "2", TORCH.who(tmp_path)))
    batch = tmp_path / "batch.sh"
    batch.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 {launcher}\n")
    options = ["--wait", "-N2", "--ntasks-per-node=1", "--cpus-per-task=2", f"--output={tmp_path}/out"]
    done = subprocess.run(
        [*slurm.on(1), *(f"{k}={v}" for k, v in env(tmp_path).items()), "sbatch", *options, str(batch)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    output = (tmp_path / "out").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + output + slurm.log()
    everyone_is_right("".join(line + "\n" for line in output.splitlines() if not line.startswith("[launcher] ")))


def test_srun_alone_numbers_the_ranks(slurm: Slurm, tmp_path: Path) -> None:
    script = PLAIN.who(tmp_path)
    command = slurm.srun("-N2", "-n4", "--ntasks-per-node=2", "--label", PYTHON)
    with launched(command, script, folder=tmp_path, **env(tmp_path)) as job:
        assert job.wait() == 0, job.err + slurm.log()
    everyone_is_right(re.sub(r"^(\d+): ", r"[rank=\1] ", job.out, flags=re.MULTILINE))


def test_srun_alone_without_a_secret_shows_a_remedy(slurm: Slurm, tmp_path: Path) -> None:
    command = slurm.srun("-N2", "-n4", "--ntasks-per-node=2", PYTHON)
    write(tmp_path, "plain.py", "from det_core import core\nwith core.init() as ctx:\n    pass\n")
    for script, line in {
        PLAIN.who(tmp_path): "DET_CORE_SECRET",
        "plain.py": "core.DistributedContext.from_slurm()",
    }.items():
        with launched(command, script, folder=tmp_path, **env(tmp_path, DET_CORE_SECRET="")) as job:
            assert job.wait() == 1, job.err
        assert job.err.count(line) >= 4, job.err


def test_scancel_lets_every_rank_save(slurm: Slurm, tmp_path: Path) -> None:
    write(tmp_path, "saves.py", SAVES)
    command = slurm.srun("-N2", "-n2", "--cpus-per-task=2", *TORCH.launcher("--nproc-per-node", "2"))
    with launched(command, "saves.py", folder=tmp_path, **env(tmp_path)) as job:
        job.wait_for("ready", times=4)
        (number,) = slurm.jobs()
        slurm.hosts.run(1, "env", f"SLURM_CONF={slurm.env['SLURM_CONF']}", "scancel", "--signal=TERM", number)
        assert job.wait() == 0, job.err + slurm.log()
    assert sorted(p.name for p in tmp_path.glob("saved-*")) == [f"saved-{rank}" for rank in range(4)]
    assert len(re.findall(r"SIGTERM forwarded to 2 ranks; grace period 60 s", job.err)) == 2


def test_several_launchers_per_node_are_refused(slurm: Slurm, tmp_path: Path) -> None:
    write(tmp_path, "ok.py", "print('ran')")
    command = slurm.srun("-N2", "-n4", "--ntasks-per-node=2", *TORCH.launcher())
    with launched(command, "ok.py", folder=tmp_path, **env(tmp_path)) as job:
        assert job.wait() == 2, job.err
    assert "--ntasks-per-node=1" in job.err and "ran" not in job.out
