"""A real Slurm on the two machines of ``support.hosts``: its controller on the first, a daemon and two CPUs on each.

It has a munge of its own, so it neither needs nor disturbs one that the system runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.hosts import ADDRESSES, NAMES, Hosts, skip_or_fail
from support.processes import until

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scancel", "munged")
_CONFIG = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
PartitionName=debug Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why Slurm cannot run here; None if it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge (or `make ci`)"
    return None


class Slurm:
    """A running cluster, up from construction to :meth:`close`."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        """The variables by which Slurm's commands find it."""
        self._servers: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir()
        text = _CONFIG.format(first=NAMES[0], address=ADDRESSES[0], folder=folder, nodes=",".join(NAMES))
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            text += f"NodeName={name} NodeAddr={address} CPUs=4 RealMemory=1000 State=UNKNOWN\n"
        (folder / "slurm.conf").write_text(text)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "seed", "pid", "log")]
        socket = self.folder / "munge.socket"
        self._serve(1, "munged", "--foreground", "--force", f"--socket={socket}", *files)
        self._wait("munged", socket.exists)
        self._serve(1, "slurmctld", "-D")
        for number, name in enumerate(NAMES, 1):
            (self.folder / f"spool-{name}").mkdir()
            self._serve(number, "slurmd", "-D", "-N", name)
        self._wait("two idle nodes", lambda: self._states() == ["idle", "idle"])

    def on(self, number: int) -> list[str]:
        """The words to put before a command that is to run on machine 1 or 2 with Slurm's commands at hand."""
        return [*self.hosts.on(number), "env", *(f"{name}={value}" for name, value in self.env.items())]

    def srun(self, *options: str) -> list[str]:
        """The words to put before a command that is to run as the tasks of a job, seen from machine 1."""
        return [*self.on(1), "srun", "--immediate=60", *options]

    def jobs(self) -> list[str]:
        """The ids of the jobs that have not ended."""
        command = [*self.on(1), "squeue", "-h", "-o", "%i"]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    def cancel(self) -> None:
        """End what a test that has failed has left in the queue, so that the next one finds idle nodes."""
        if jobs := self.jobs():
            subprocess.run([*self.on(1), "scancel", "--full", "--signal=KILL", *jobs])
            self._wait("end of all jobs", lambda: not self.jobs())

    def close(self) -> None:
        """End every daemon."""
        for server in reversed(self._servers):
            server.kill()
            server.wait()

    def log(self) -> str:
        """What the daemons have to say."""
        return "".join(p.read_text(errors="replace")[-2000:] for p in sorted(self.hosts.folder.glob("server-*.log")))

    def _states(self) -> list[str]:
        command = [*self.on(1), "sinfo", "-h", "-N", "-o", "%t"]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    def _serve(self, number: int, program: str, *words: str) -> None:
        self._servers.append(self.hosts.serve(number, shutil.which(program) or program, *words, env=self.env))

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        def look() -> bool:
            ended = [server.args for server in self._servers if server.poll() is not None]
            assert not ended, f"no {what} (ended: {ended})"
            return is_there()

        until(look, lambda: f"no {what}:\n{self.log()}")


@pytest.fixture(scope="session")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster for all tests."""
    if reason := missing():
        skip_or_fail(reason)
    cluster = Slurm(hosts, tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster
    finally:
        cluster.close()
