"""Commands of Slurm: run them, and read what they print."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from det_core._env import changed_environment

COMMAND_TIMEOUT = 60.0
"""Longest wait for one command; without a controller it takes 9 s until it says so."""
CANCELLED = "cancelled"
"""Cause of a stop: a person's ``scancel`` or ``det-core slurm cancel``."""
PREEMPTION = "preemption"
TAIL_BYTES = 1 << 20
"""End of a job's output in which Slurm's line is looked for."""
_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SLURM_CONF", "TZ", "USER")
_TIME = "%Y-%m-%dT%H:%M:%S"
_LAST_WORDS = r"\*\*\* JOB {job} ON \S+ CANCELLED AT (\S+)(?: DUE TO ([^*]+?))? \*\*\*"


class SlurmError(OSError):
    """A command of Slurm that failed, in Slurm's own words."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that has not ended, as ``squeue`` shows it."""

    job: str
    state: str
    reason: str
    nodes: str
    end: str
    name: str

    @property
    def is_pending(self) -> bool:
        """Whether it has not started."""
        return self.state == "PENDING"

    @property
    def end_time(self) -> float:
        """Time of its limit in seconds since the epoch; infinite where squeue says NONE or N/A."""
        with suppress(ValueError):
            return time.mktime(time.strptime(self.end, _TIME))
        return math.inf

    def __str__(self) -> str:
        return f"{self.job} {self.state} {self.nodes or f'({self.reason})'}"


def run_slurm(*command: str, timeout: float = COMMAND_TIMEOUT) -> str:
    """Run a command of Slurm and return its output.

    Raises:
        SlurmError: If it is not there, fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=few_variables(), stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer in {timeout:g} s") from None
    except FileNotFoundError:
        advice = "run this where Slurm's commands are, such as a login node"
        raise SlurmError(f"{command[0]}: not found; {advice}") from None
    if done.returncode != 0:
        words = done.stderr.strip().removeprefix(f"{command[0]}: ").replace(f"\n{command[0]}: ", "; ")
        raise SlurmError(f"{command[0]}: {words or f'status {done.returncode}'}")
    return done.stdout.strip()


def few_variables() -> dict[str, str]:
    """Return the variables that a command of Slurm needs.

    Those of a job around it would change what it does, and the controller would store the others with the job. sbatch
    has ``--export=NIL`` for that, with which slurmd first starts a login shell of the user's: 2 s, measured.
    """
    return {name: value for name, value in changed_environment({}).items() if name in _VARIABLES}


def list_jobs(timeout: float = COMMAND_TIMEOUT) -> list[QueuedJob]:
    """Return this user's jobs that have not ended."""
    command = ("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i|%T|%r|%N|%e|%j")
    return [QueuedJob(*line.split("|", 5)) for line in run_slurm(*command, timeout=timeout).splitlines()]


def stop_cause(log: Path, job: str, since: float) -> str:
    """Return why Slurm ended a job; empty if the job's own output does not say.

    While a job is being ended its state is COMPLETING whatever the cause, so this line is the only witness. Those about
    a STEP never name a cause, and those before ``since`` are of a job that was requeued: it writes the same log again.
    """
    with suppress(FileNotFoundError), log.open("rb") as f:
        f.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = f.read().decode(errors="replace")
        earliest = time.strftime(_TIME, time.localtime(since))
        for at, cause in re.findall(_LAST_WORDS.format(job=job), text)[::-1]:
            if at >= earliest:
                return str(cause).lower() or CANCELLED
    return ""


def is_preempted(job: str, timeout: float) -> bool:
    """Return whether Slurm has begun to preempt a job."""
    return "PreemptTime=2" in run_slurm("scontrol", "show", "job", "--oneliner", job, timeout=timeout)  # of the year
