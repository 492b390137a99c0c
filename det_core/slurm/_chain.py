"""The record of a chain: a directory ``slurm`` in its run's directory, readable by its owner alone.

======================  =================================================================
``chain.json``          name, base, jobs and end; written by the job that holds ``lock``
``submitted``           IDs of all jobs, for those that never began
``job.sh``, ``env.sh``  batch file; environment of the submit, which is removed at the end
``secret``              of the launchers and ranks of several nodes
``job-ID.log``          output of a job
``stop-ID``             number of the signal for the launchers of several nodes
``cancel``              a person's wish that the chain ends: ``save`` or ``now``
======================  =================================================================
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from det_core._standalone.files import write_atomic
from det_core.journal import RunFolder, RunRecord
from det_core.journal._run_folder import run_paths
from det_core.slurm._commands import COMMAND_TIMEOUT, QueuedJob, list_jobs, run_slurm
from det_core.slurm._policy import JobRecord

FOLDER = "slurm"


class Chain:
    """One chain on disk.

    Attributes:
        name: of the chain and of its jobs, by which Slurm's listing tells whose they are.
        base: starts and newest checkpoint of the run before the first job.
        jobs: all jobs that have had their turn, oldest first.
        end: how the chain ended; empty while it goes on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_path = folder.parent
        self.run_id = self.run_path.name
        self.home = self.run_path.parent.parent
        self.load()

    @classmethod
    def create(cls, home: Path, name: str, command: Sequence[str], resume: str = "") -> Chain:
        """Make the chain of a new run that has not begun, or of the run ``resume``, whose earlier chain has ended.

        Raises:
            RunError: If the run's directory cannot be made, or no run has the ID ``resume``.
            ValueError: If the chain of the run to resume has not ended.
        """
        base = JobRecord()
        if resume:
            run = RunFolder.open(home, resume)
            record = RunRecord(run.path)
            base = JobRecord(starts=record.starts, checkpoint=newest_checkpoint(record)[0])
            earlier = chain_of_run(run.path)
            if earlier and not earlier.end:
                advice = f"to end it: det-core slurm cancel {run.run_id}"
                raise ValueError(f"the chain of run {run.run_id} has not ended; {advice}")
        else:
            run = RunFolder.create(home, name=os.path.abspath(script_of(command)))
        folder = run.path / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        for state in ("cancel", "submitted"):
            (folder / state).unlink(missing_ok=True)
        content = {"name": f"{name}.{run.run_id[-6:]}", "base": base, "jobs": [], "end": ""}  # a unique name
        write_atomic(folder / "chain.json", json.dumps(content, default=vars).encode(), mode=0o600)
        write_atomic(folder / "secret", secrets.token_hex(32).encode(), mode=0o600)
        return cls(folder)

    def load(self) -> None:
        """Read ``chain.json`` again, as another job of the chain has left it."""
        record = json.loads((self.folder / "chain.json").read_bytes())
        self.name: str = record["name"]
        self.base = JobRecord(**record.get("base", {}))
        self.jobs = [JobRecord(**job) for job in record["jobs"]]
        self.end: str = record["end"]

    def save(self, end: str = "") -> None:
        """Write ``chain.json``; at the chain's end with how it ended, and then the environment of the submit goes."""
        self.end = end
        record = {"name": self.name, "base": self.base, "jobs": self.jobs, "end": end}
        self.write("chain.json", json.dumps(record, default=vars).encode())
        if end:
            (self.folder / "env.sh").unlink(missing_ok=True)

    def log(self, job: str) -> Path:
        """Return the path of a job's output; ``%j`` as the ID is what sbatch takes."""
        return self.folder / f"job-{job}.log"

    def write(self, name: str, data: bytes) -> None:
        """Replace one of the chain's files, readable by its owner alone."""
        write_atomic(self.folder / name, data, mode=0o600)

    def read(self, name: str) -> str:
        """Return the text of one of the chain's files; empty if there is none."""
        with suppress(FileNotFoundError):
            return (self.folder / name).read_text()
        return ""

    @property
    def cancel_request(self) -> str:
        """``save`` or ``now`` if a person wants the chain to end, else empty."""
        return self.read("cancel")

    @property
    def submitted(self) -> list[str]:
        """IDs of the jobs, oldest first, but of those that a person has submitted to go on."""
        return self.read("submitted").split()

    def submit_command(self, *options: str) -> list[str]:
        """Return the command that submits a job of this chain."""
        words = [f"--job-name={self.name}", f"--output={self.log('%j')}", *options]
        return ["sbatch", "--parsable", *words, str(self.folder / "job.sh"), str(self.folder)]

    def submit(self, after: str = "", timeout: float = COMMAND_TIMEOUT) -> str:
        """Submit a job that waits for the end of another one, and return its ID."""
        dependency = [f"--dependency=afterany:{after}"] * bool(after)
        answer = run_slurm(*self.submit_command(*dependency), timeout=timeout)
        job = answer.partition(";")[0]  # behind that is the cluster's name
        self.write("submitted", " ".join([*self.submitted, job]).encode())
        return job

    def own(self, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
        """Return those of Slurm's jobs that are this chain's; the first one that a person submits has another name."""
        submitted = self.submitted
        return [job for job in jobs if job.name == self.name or job.job in submitted]

    def cancel_pending(self) -> list[str]:
        """Cancel the jobs that have not started, and return the IDs of those that have."""
        jobs = self.own(list_jobs())
        if pending := [job.job for job in jobs if job.is_pending]:
            run_slurm("scancel", *pending)
        return [job.job for job in jobs if not job.is_pending]


def script_of(command: Sequence[str]) -> str:
    """Return the script's file in a command, or the program."""
    return next((word for word in command if word.endswith((".py", ".sh"))), command[0])


def newest_checkpoint(run: RunRecord) -> tuple[str | None, int | None]:
    """Return ID and step of the newest checkpoint that a run has recorded, also if it is deleted by now."""
    saved = [record for record in run.records("checkpoint") if "storage_id" in record]
    if not saved:
        return None, None
    return str(saved[-1]["storage_id"]), (saved[-1].get("metadata") or {}).get("steps_completed")


def chain_of_run(path: Path) -> Chain | None:
    """Return the chain of the run in this directory; None if it was not submitted to Slurm."""
    return Chain(path / FOLDER) if (path / FOLDER / "chain.json").exists() else None


def list_chains(home: Path) -> list[Chain]:
    """Return all chains, newest first."""
    return [chain for path in run_paths(home) if (chain := chain_of_run(path))]


def find_chain(home: Path, run_id: str) -> Chain:
    """Return the chain of a run: by the run's ID or its beginning, the chain's name, a job's ID, or ``latest``.

    Raises:
        RunNotFound: If no run or several have this ID.
        ValueError: If the run has no chain.
    """
    for chain in list_chains(home):
        if run_id in ("latest", chain.name, *chain.submitted):
            return chain
    path = RunFolder.open(home, run_id).path
    found = chain_of_run(path)
    if found is None:
        raise ValueError(f"run {path.name} has no chain of Slurm jobs: det-core slurm list shows those that have")
    return found
