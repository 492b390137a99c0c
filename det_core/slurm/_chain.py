"""The record of a chain: a directory ``slurm`` in its run's directory, readable by its owner alone.

Each file has one writer, and all but logs are replaced as a whole, so no two nodes write one file:

=====================  =========================================================================
``chain.json``         name and command, written before the first job is submitted
``submitted.json``     IDs of the jobs that ``det-core slurm submit`` has submitted
``job.sh``, ``env.sh`` batch file of every job; environment of the submit (0600, removed at the end)
``secret``             secret of the launchers and ranks of several nodes (0600)
``job-ID.log``         output of a job
``job-ID-N.json``      a job's start and end, N counting requeues; of a lost one the next job writes the end
``stop-ID``            word to the launchers of several nodes
``cancel``, ``end.json``  a person's wish; how the chain ended
``lock``               held by the job whose turn it is
=====================  =========================================================================
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core._standalone.files import write_atomic
from det_core.journal import RunFolder, RunRecord, RunSummary
from det_core.journal._run_folder import run_paths
from det_core.slurm._commands import QueuedJob
from det_core.slurm._policy import NOT_BEGUN, ChainEnd, JobEnd
from det_core.slurm._script import script_of

FOLDER = "slurm"


@dataclass
class JobRecord:
    """Record of one job of a chain; times are seconds since the epoch.

    Attributes:
        job: Slurm's ID.
        requeues: how often Slurm had started it before.
        number: position in the chain, from 1 on.
        host: the node of its program.
        started: time of its start.
        starts: starts of the run before.
        checkpoint: newest checkpoint before.
        log_offset: size of the log before.
        ended: time of its end; None: it runs, or is lost.
        end: how it ended.
    """

    job: str
    requeues: int
    number: int
    host: str
    started: float
    starts: int
    checkpoint: str | None
    log_offset: int
    ended: float | None = None
    end: JobEnd | None = None

    @classmethod
    def read(cls, path: Path) -> JobRecord:
        """Read a record."""
        values = json.loads(path.read_bytes())
        if values["end"]:
            values["end"] = JobEnd(**values["end"])
        return cls(**values)


class Chain:
    """One chain on disk.

    Args:
        folder: its directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_path = folder.parent
        self.run_id = folder.parent.name
        self.home = folder.parent.parent.parent

    @classmethod
    def create(cls, home: Path, *, name: str, command: list[str]) -> Chain:
        """Make a run that has not begun, and the directory of its chain.

        Args:
            home: where runs are kept.
            name: of chain and jobs; the run's ID makes it one of its own.
            command: what the jobs run.

        Raises:
            RunError: If the run's directory cannot be made.
        """
        run = RunFolder.create(home, name=os.path.abspath(script_of(command)))
        chain = cls(run.path / FOLDER)
        chain.folder.mkdir(mode=0o700)
        chain.write("secret", secrets.token_hex(32).encode())
        spec = {"name": f"{name}.{chain.run_id[-6:]}", "command": command, "cwd": os.getcwd(), "time": _clock.now()}
        chain.write("chain.json", json.dumps(spec).encode())
        return chain

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Name, command, directory and time of the submit."""
        return dict(json.loads((self.folder / "chain.json").read_bytes()))

    @property
    def name(self) -> str:
        """Name of the chain; those of its jobs add a number."""
        return str(self.spec["name"])

    def job_name(self, number: int) -> str:
        """Return the name of a job, by which Slurm's listing tells whose it is."""
        return f"{self.name}.{number}"

    def own(self, jobs: list[QueuedJob]) -> list[QueuedJob]:
        """Return those of Slurm's jobs that are this chain's."""
        return [job for job in jobs if job.name.rpartition(".")[0] == self.name]

    def path(self, name: str) -> Path:
        """Return the path of one of the chain's files."""
        return self.folder / name

    def log(self, job: str) -> Path:
        """Return the path of a job's output; ``%j`` as the ID is what sbatch takes."""
        return self.folder / f"job-{job}.log"

    def write(self, name: str, data: bytes) -> None:
        """Replace one of the chain's files, readable by its owner alone."""
        write_atomic(self.folder / name, data, mode=0o600)

    def save(self, record: JobRecord) -> None:
        """Write a job's record."""
        self.write(f"job-{record.job}-{record.requeues}.json", json.dumps(asdict(record)).encode())

    def jobs(self) -> list[JobRecord]:
        """Return the records of all jobs that have started, oldest first."""
        return sorted(map(JobRecord.read, self.folder.glob("job-*-*.json")), key=lambda record: record.number)

    def submitted(self) -> list[str]:
        """Return the IDs of the jobs that the submit has made; empty where the batch file was submitted by hand."""
        path = self.folder / "submitted.json"
        return list(json.loads(path.read_bytes())) if path.exists() else []

    def end(self) -> ChainEnd | None:
        """Return how the chain ended; None while it goes on."""
        path = self.folder / "end.json"
        if not path.exists():
            return None
        values = json.loads(path.read_bytes())
        return ChainEnd(values["outcome"], values["reason"])

    def record_end(self, end: ChainEnd) -> None:
        """Record the end, unless there is one, and remove the environment of the submit."""
        if self.end() is None:
            jobs = list(dict.fromkeys(record.job for record in self.jobs()))
            self.write("end.json", json.dumps({**asdict(end), "time": _clock.now(), "jobs": jobs}).encode())
        self.path("env.sh").unlink(missing_ok=True)

    @property
    def cancel_request(self) -> str | None:
        """A person's wish that the chain ends: ``save`` or ``now``; None: there is none."""
        path = self.path("cancel")
        return path.read_text() if path.exists() else None

    def submit_command(self, number: int, *options: str) -> list[str]:
        """Return the command that submits the job of this number."""
        words = [f"--job-name={self.job_name(number)}", f"--output={self.log('%j')}", *options]
        return ["sbatch", "--parsable", *words, str(self.path("job.sh")), str(self.folder)]

    def run(self) -> RunSummary:
        """Return what is known of the run now."""
        return RunSummary(self.run_path)

    def state_since(self, starts: int) -> str:
        """Return the run's state, :data:`NOT_BEGUN` if it has had no start beyond so many."""
        run = self.run()
        return run.state if run.live or run.starts > starts else NOT_BEGUN


def newest_checkpoint(run: RunRecord) -> tuple[str | None, int | None]:
    """Return ID and step of the newest checkpoint that a run has recorded, also if it is deleted by now."""
    saved = [record for record in run.records("checkpoint") if "storage_id" in record]
    if not saved:
        return None, None
    metadata = saved[-1].get("metadata")
    steps = metadata.get("steps_completed") if isinstance(metadata, dict) else None
    return str(saved[-1]["storage_id"]), steps


def chain_of_run(path: Path) -> Chain | None:
    """Return the chain of the run in this directory; None if it was not submitted to Slurm."""
    return Chain(path / FOLDER) if (path / FOLDER / "chain.json").exists() else None


def list_chains(home: Path) -> list[Chain]:
    """Return all chains, newest first."""
    return [chain for path in run_paths(home) if (chain := chain_of_run(path))]


def find_chain(home: Path, run_id: str) -> Chain:
    """Return the chain of a run.

    Args:
        home: where runs are kept.
        run_id: the run's ID, the beginning of one, ``latest`` for the newest chain, or a chain's name.

    Raises:
        RunNotFound: If no run or several have this ID.
        ValueError: If the run has no chain.
    """
    for chain in list_chains(home):
        if run_id in ("latest", chain.name, chain.name.rpartition(".")[0]):
            return chain
    path = RunFolder.open(home, run_id).path
    found = chain_of_run(path)
    if found is None:
        raise ValueError(f"run {path.name} has no chain of Slurm jobs: det-core slurm list shows those that have")
    return found
