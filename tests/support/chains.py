"""Chains of jobs on a real Slurm: scripts to submit, commands of a user, and what their runs have recorded."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from det_core import client
from det_core.journal import Row, read_run
from det_core.slurm import Chain, find_chain
from det_core.slurm._chain import newest_checkpoint
from det_core.slurm._policy import JobRecord
from support.hosts import NAMES
from support.processes import until
from support.slurm import Slurm

TRAIN = """
import json, os, signal, sys, time
from det_core import core

total, every, fail_at, workers = (int(os.environ.get(k, "0")) for k in ("TOTAL", "EVERY", "FAIL_AT", "WORKERS"))
asks, pause = os.environ.get("ASKS", "1") == "1", float(os.environ.get("PAUSE", "0.2"))
if os.environ.get("DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Steps(list):
    def __getitem__(self, i):
        time.sleep(pause)
        return list.__getitem__(self, i)

with core.init(distributed=core.DistributedContext.detect()) as ctx:
    with ctx.checkpoint.resume() as path:
        done = json.loads((path / "step.json").read_text()) if path else 0
    chief = ctx.distributed.rank == 0
    left = Steps(range(done + 1, total + 1))
    loader = map(left.__getitem__, range(len(left)))
    if workers:
        import torch
        loader = torch.utils.data.DataLoader(left, num_workers=workers)
    for step in map(int, loader):
        if chief:
            ctx.train.report_training_metrics(step, {"loss": 1 / step})
        if step == fail_at:
            raise ValueError(f"broken at step {step}")
        stop = asks and ctx.preempt.should_preempt()
        if chief and (stop or step == total or (every and step % every == 0)):
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "step.json").write_text(json.dumps(step))
        if stop:
            sys.exit(0)
"""


class Cluster:
    """A cluster as one user sees it.

    Args:
        slurm: the daemons.
        folder: home directory, and the directory of the scripts.
        user: number of the user; None: the one of this process.
    """

    def __init__(self, slurm: Slurm, folder: Path, user: int | None = None) -> None:
        self.slurm = slurm
        self.folder = folder
        self.home = folder / "home"
        self.user = user
        self.script("train.py", TRAIN)

    def script(self, name: str, text: str) -> None:
        """Write a script."""
        (self.folder / name).write_text(text)

    def run(self, *command: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node as the user."""
        fixed = {"DET_CORE_HOME": str(self.home), "HOME": str(self.folder), "GLOO_SOCKET_IFNAME": "eth0",
                 "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ""}  # fmt: skip
        who = [] if self.user is None else ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        words = [*self.slurm.on(1), *(f"{k}={v}" for k, v in {**fixed, **variables}.items()), *who, *command]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.slurm.log()
        return done

    def det_core(self, *words: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``det-core slurm``."""
        return self.run("det-core", "slurm", *words, check=check, **variables)

    def submit(self, *options: str, command: Sequence[str] = ("python", "train.py"), **variables: str) -> ChainOfTest:
        """Submit a chain."""
        said = self.det_core("submit", *options, "--", *command, **variables).stdout
        match = re.search(r"^run (\S+)", said, re.MULTILINE)
        assert match, said
        return ChainOfTest(self, find_chain(self.home, match[1]))


def show_python(slurm: Slurm) -> None:
    """Let every user of the nodes run this Python, which may lie in root's home: an open one is laid over it there."""
    home = Path("/root")
    python = Path(sys.executable).resolve()
    if not python.is_relative_to(home):
        return
    place = home / python.relative_to(home).parts[0]
    for name in NAMES:
        behind = slurm.folder / f"python-{slurm.pid(name)}"
        if not behind.exists():
            behind.mkdir()
            lines = [f"mount --bind {place} {behind}", f"mount -t tmpfs -o mode=755 tmpfs {home}", f"mkdir {place}",
                     f"mount --bind {behind} {place}"]  # fmt: skip
            slurm.inside(name, "sh", "-ec", "; ".join(lines))


class ChainOfTest:
    """A chain that a test has submitted."""

    def __init__(self, cluster: Cluster, chain: Chain) -> None:
        self.cluster = cluster
        self.chain = chain

    def log(self) -> str:
        """Return the logs of all jobs."""
        return "".join(f"== {p.name}\n{p.read_text(errors='replace')}" for p in sorted(self.chain.folder.glob("*.log")))

    def wait(self, look: Callable[[], object]) -> None:
        """Wait for something; the end of all jobs without it is an error that shows all there is."""
        looks = itertools.count(1)

        def look_or_fail() -> object:
            is_last = next(looks) % 40 == 0 and not self.cluster.slurm.knows_jobs()
            found = look()
            assert found or not is_last, "no job is left"
            return found or None

        until(look_or_fail, lambda: self.log() + self.cluster.slurm.log())

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has reported a step."""
        self.wait(lambda: max((row.steps_completed or 0 for row in self.rows()), default=0) >= step)

    def wait_for_end(self) -> str:
        """Wait until the chain has ended and nothing of it is queued or runs; return how it ended."""
        self.wait(lambda: self.end())
        until(lambda: not self.cluster.slurm.knows_jobs())
        return self.end()

    def end(self) -> str:
        """Return how the chain has ended; empty while it goes on."""
        self.chain.load()
        return self.chain.end

    def jobs(self) -> list[JobRecord]:
        """Return the records of the jobs that have had their turn."""
        self.chain.load()
        return self.chain.jobs

    def rows(self, *, superseded: bool = False) -> list[Row]:
        """Return the rows that the run has reported."""
        return list(client.run(self.chain.run_id, self.cluster.home).rows("training", superseded=superseded))

    def checkpoint(self) -> str | None:
        """Return the newest checkpoint."""
        return newest_checkpoint(read_run(self.chain.run_path))[0]

    def repeated(self) -> int:
        """Return how many steps were reported again after a resume."""
        return len(self.rows(superseded=True)) - len(self.rows())

    def pauses(self) -> list[float]:
        """Return the seconds between the end of each job and the start of the next one."""
        jobs = self.jobs()
        return [round(b.started - (a.ended or 0), 1) for a, b in itertools.pairwise(jobs)]

    def show(self, title: str) -> None:
        """Print what the record of the test is to say."""
        ends = [(job.state, job.status, job.stop) for job in self.jobs() if job.state]
        print(f"{title}: {self.end()}; {len(ends)} jobs; {self.repeated()} of {len(self.rows())} repeated; "
              f"pauses {self.pauses()}; {json.dumps(ends)}")  # fmt: skip

    def check_every_step_once(self, total: int) -> None:
        """Check that the record has every step, and each once."""
        assert [row.steps_completed for row in self.rows()] == list(range(1, total + 1)), self.log()
        assert self.repeated() == 0, self.log()
