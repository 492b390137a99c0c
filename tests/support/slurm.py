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
SchedulerType=sched/{scheduler}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
PartitionName=debug Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return the reason why Slurm cannot run here; None if it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge (or `make ci`)"
    return None


class Slurm:
    """A running cluster, up from construction to :meth:`close`.

    Args:
        hosts: its machines.
        folder: where its files are kept.
        scheduler: name of Slurm's plugin.
        kill_wait: seconds between SIGTERM and SIGKILL.
        more: further lines of its configuration.
    """

    def __init__(
        self, hosts: Hosts, folder: Path, *, scheduler: str = "builtin", kill_wait: int = 60, more: str = ""
    ) -> None:
        self.hosts = hosts
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        """The variables by which Slurm's commands find it."""
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir()
        text = _CONFIG.format(
            first=NAMES[0], address=ADDRESSES[0], folder=folder, nodes=",".join(NAMES), scheduler=scheduler,
            kill_wait=kill_wait,
        )  # fmt: skip
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            text += f"NodeName={name} NodeAddr={address} CPUs=4 RealMemory=1000 State=UNKNOWN\n"
        (folder / "slurm.conf").write_text(text + more)
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
        self._serve("munged", 1, "munged", "--foreground", "--force", f"--socket={socket}", *files)
        self._wait("munged", socket.exists)
        self.start("slurmctld")
        for name in NAMES:
            (self.folder / f"spool-{name}").mkdir()
            self.start(name)
        self.wait_for_nodes()

    def start(self, name: str) -> None:
        """Start the controller, or the daemon of a node."""
        if name == "slurmctld":
            self._serve(name, 1, "slurmctld", "-D")
        else:
            self._serve(name, NAMES.index(name) + 1, "slurmd", "-D", "-N", name)

    def kill(self, name: str) -> None:
        """Kill what :meth:`start` has started."""
        server = self._servers.pop(name)
        server.kill()
        server.wait()

    def pid(self, name: str) -> int:
        """Return the process ID of what :meth:`start` has started."""
        return self._servers[name].pid

    def inside(self, name: str, *command: str) -> None:
        """Run a command among the mounts of a daemon, which jobs of that node see."""
        target = f"--target={self.pid(name)}"
        subprocess.run(["nsenter", "--mount", target, *command], check=True)

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are idle."""
        self._wait("two idle nodes", lambda: self._states() == ["idle", "idle"])

    def on(self, number: int) -> list[str]:
        """Return the words to put before a command to run it on machine 1 or 2 with Slurm's commands at hand."""
        return [*self.hosts.on(number), "env", *(f"{name}={value}" for name, value in self.env.items())]

    def srun(self, *options: str) -> list[str]:
        """Return the words to put before a command to run it as a job's tasks, seen from machine 1."""
        return [*self.on(1), "srun", "--immediate=60", *options]

    def jobs(self) -> list[str]:
        """Return the IDs of the jobs that have not ended."""
        command = [*self.on(1), "squeue", "-h", "-o", "%i"]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    def knows_jobs(self) -> bool:
        """Return whether there may be a job that has not ended; True while the controller does not answer."""
        command = [*self.on(1), "squeue", "-h", "-o", "%i"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode != 0 or bool(done.stdout.strip())

    def cancel(self) -> None:
        """End what a test that has failed has left in the queue, so that the next one finds idle nodes."""
        if jobs := self.jobs():
            subprocess.run([*self.on(1), "scancel", "--full", "--signal=KILL", *jobs])
            self._wait("end of all jobs", lambda: not self.jobs())

    def close(self) -> None:
        """End every daemon."""
        for server in reversed(self._servers.values()):
            server.kill()
            server.wait()

    def log(self) -> str:
        """Return the logs of the daemons."""
        return "".join(p.read_text(errors="replace")[-2000:] for p in sorted(self.hosts.folder.glob("server-*.log")))

    def _states(self) -> list[str]:
        command = [*self.on(1), "sinfo", "-h", "-N", "-p", "debug", "-o", "%t"]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    def _serve(self, name: str, number: int, program: str, *words: str) -> None:
        self._servers[name] = self.hosts.serve(number, shutil.which(program) or program, *words, env=self.env)

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        def look() -> bool:
            ended = [server.args for server in self._servers.values() if server.poll() is not None]
            assert not ended, f"no {what} (ended: {ended})"
            return is_there()

        until(look, lambda: f"no {what}:\n{self.log()}")


@pytest.fixture(scope="session")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Yield a cluster for all tests."""
    if reason := missing():
        skip_or_fail(reason)
    cluster = Slurm(hosts, tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster
    finally:
        cluster.close()
