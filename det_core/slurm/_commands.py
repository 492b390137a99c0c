"""Commands of Slurm: run them, and read what they print."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass

from det_core._env import changed_environment

COMMAND_TIMEOUT = 60.0
"""Seconds for one command; without a controller it takes 9 s until it says so."""
CANCELLED = "cancelled"
"""Cause of a stop: a person's ``scancel`` or ``det-core slurm cancel``."""
PREEMPTION = "preemption"
_NEEDED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SLURM_CONF", "TZ", "USER")
_LAST_WORDS = r"\*\*\* JOB {job} ON \S+ CANCELLED AT \S+(?: DUE TO ([^*]+?))? \*\*\*"
_FORMAT = "%i|%T|%r|%N|%j"


class SlurmError(OSError):
    """A command of Slurm that failed, in Slurm's own words."""

    @property
    def is_away(self) -> bool:
        """Whether the controller did not answer; else it refuses."""
        return re.search(r"ontact|onnect|imed out|no answer|Zero Bytes", str(self)) is not None


@dataclass(frozen=True)
class QueuedJob:
    """A job that Slurm has, as ``squeue`` shows it."""

    job: str
    state: str
    reason: str
    nodes: str
    name: str

    @property
    def is_pending(self) -> bool:
        """Whether it has not started."""
        return self.state == "PENDING"

    def __str__(self) -> str:
        place = self.nodes or (f"({self.reason})" if self.reason not in ("", "None") else "")
        return f"{self.job} {self.state} {place}".rstrip()


def run_slurm(*command: str, timeout: float = COMMAND_TIMEOUT) -> str:
    """Run a command of Slurm and return its output.

    Raises:
        SlurmError: If it is not there, fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=command_variables(), stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer in {timeout:g} s") from None
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]}: not found; run this where Slurm's commands are, such as a login node"
        ) from None
    if done.returncode != 0:
        words = done.stderr.strip().removeprefix(f"{command[0]}: ").replace(f"\n{command[0]}: ", "; ")
        raise SlurmError(f"{command[0]}: {words or f'status {done.returncode}'}")
    return done.stdout.strip()


def command_variables() -> dict[str, str]:
    """Return the few variables that a command of Slurm gets.

    Those of a job around it would change what it does, and the controller would store the others with the job. sbatch
    has ``--export=NIL`` for that, with which slurmd first starts a login shell of the user's: 2 s, measured.
    """
    return {name: value for name, value in changed_environment({}).items() if name in _NEEDED}


def own_jobs() -> list[QueuedJob]:
    """Return this user's jobs that have not ended."""
    lines = run_slurm("squeue", "--noheader", f"--user={os.getuid()}", f"--format={_FORMAT}").splitlines()
    return [QueuedJob(*values) for line in lines if len(values := line.split("|", 4)) == 5]


def job_end(job: str, timeout: float = COMMAND_TIMEOUT) -> float | None:
    """Return the time at which a job's limit is reached, in seconds since the epoch; None if it has no limit."""
    return parse_time(run_slurm("squeue", "--noheader", f"--jobs={job}", "--format=%e", timeout=timeout))


def parse_time(text: str) -> float | None:
    """Return one of Slurm's points in time in seconds since the epoch; None where it is none, as NONE and N/A."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def stop_cause(log: str, job: str) -> str | None:
    """Return why Slurm ended a job, from the job's own output; None if it says nothing of that.

    While a job is being ended its state is COMPLETING whatever the cause, so this line is the only witness. Those about
    a STEP never name a cause.
    """
    causes = re.findall(_LAST_WORDS.format(job=job), log)
    if not causes:
        return None
    return str(causes[-1]).lower() or CANCELLED


def is_preempted(job: str) -> bool:
    """Return whether Slurm has begun to preempt a job."""
    return re.search(r"PreemptTime=\d", run_slurm("scontrol", "show", "job", "--oneliner", job)) is not None
