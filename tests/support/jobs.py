"""A master with its trials, all of them real processes, and what its database says of each run of a trial."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from det_core import client
from det_core.client import Experiment, Master, Trial, connect, create_experiment
from det_core.client._experiments import metric_rows
from support.leftovers import processes_of
from support.processes import until
from support.real_master import RealMaster

T = TypeVar("T")
SINGLE = {"name": "single", "metric": "loss", "max_length": 3}
COUNT = """
import os, signal, time
from pathlib import Path
from det_core import core, get_cluster_info

hparams = get_cluster_info().trial.hparams
signs = Path(os.environ["SIGNS"])

def sign(name, text=""):
    (signs / "aside").write_text(str(text))
    (signs / "aside").rename(signs / name)

def begin():  # without event files: what writes them imports all of torch
    return core.init(tensorboard_mode=core.TensorboardMode.MANUAL)

def load(ctx):
    if ctx.latest_checkpoint is None:
        return 0
    with ctx.checkpoint.restore_path(ctx.latest_checkpoint) as path:
        return int((path / "step").read_text())

def save(ctx, step):
    with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "step").write_text(str(step))

def count(ctx):
    step = load(ctx)
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            ctx.train.report_training_metrics(step, {"loss": 1 / step})
        loss = hparams.get("lr", 1.0) / step
        ctx.train.report_validation_metrics(step, {"loss": loss})
        save(ctx, step)
        op.report_completed(loss)
"""
"""Start of every script here: a training that counts, saves after each operation, and resumes."""


class Run(NamedTuple):
    """Outcome of a trial's run, as the master recorded it."""

    kind: str
    status: int | None
    """The script's exit status; minus the signal's number if one ended it."""
    steps_completed: int
    """Step from which the run started."""


class Jobs:
    """Experiments of a test on a master whose trials are processes.

    Args:
        real: the master.

    Attributes:
        home: its folder.
        master: a session with it.
        signs: a folder in which scripts leave files as signs (``$SIGNS`` for them).
    """

    def __init__(self, real: RealMaster) -> None:
        self.real = real
        self.home = real.home
        self.signs = self.home / "signs"
        self.signs.mkdir(exist_ok=True)
        self.master: Master = connect(real.url, real.token)

    def close(self) -> None:
        """Close the session; what the test has made is ended by :meth:`RealMaster.lent`, or with the master."""
        self.master.close()

    def experiments(self) -> list[Experiment]:
        """All there are."""
        return client.experiments(self.master)

    def create(self, script: str, searcher: dict[str, Any] = SINGLE, **config: Any) -> Experiment:
        """Create an experiment whose trials run :data:`COUNT` and then ``script``.

        Args:
            script: Python.
            searcher: of the configuration.
            config: more of it; by default nothing is tried again.
        """
        folder = self.home / "contexts" / str(time.monotonic_ns())
        folder.mkdir(parents=True)
        (folder / "job.py").write_text(COUNT + script)
        if hook := config.pop("hook", None):
            (folder / "startup-hook.sh").write_text(hook)
        body = {
            "name": "job",
            "entrypoint": "exec python job.py",
            "searcher": searcher,
            "max_restarts": 0,
            "reproducibility": {"experiment_seed": 7},
            "environment": {"environment_variables": [f"SIGNS={self.signs}"]},
        }
        return create_experiment({**body, **config}, folder, master=self.master)

    def sign(self, name: str) -> str:
        """Wait for a sign, take it away, and return what it says."""
        path = self.signs / name
        until(path.exists, lambda: f"no sign {name}: {self.logs()}")
        text = path.read_text()
        path.unlink()
        return text

    def ended(self, experiment: Experiment, state: str) -> list[Trial]:
        """Wait for the experiment to end in that state and return its trials."""
        found = experiment.wait()
        assert found == state, f"{found}: {experiment.refresh().error}; {self.logs()}"
        return experiment.trials()

    def until(self, experiment: Experiment, state: str) -> Trial:
        """Wait for the experiment to reach that state and return its only trial."""

        def look() -> Trial | None:
            (trial,) = experiment.trials() or [None]
            return trial if trial is not None and trial.state == state else None

        return until(look, lambda: f"{experiment.trials()}: {self.logs()}")

    def runs(self, trial: Trial) -> list[Run]:
        """Return the ended runs of a trial, in order."""
        columns = "exit_kind, exit_status, exit_signal, steps_completed"
        where = "trial_id = ? AND end_time IS NOT NULL ORDER BY run_id"
        with contextlib.closing(sqlite3.connect(self.home / "master" / "master.db")) as db:
            rows = db.execute(f"SELECT {columns} FROM allocations WHERE {where}", (trial.id,)).fetchall()
        return [Run(kind, -number if number else status, steps) for kind, status, number, steps in rows]

    def kinds(self, trial: Trial) -> list[tuple[str, int | None]]:
        """Return the outcomes of a trial's runs, without the steps from which they started."""
        return [run[:2] for run in self.runs(trial)]

    def spans(self, trial: Trial) -> list[tuple[float, float]]:
        """Return the begin and the end of the slot of each ended run of a trial."""
        query = (
            "SELECT create_time, end_time FROM allocations WHERE trial_id = ? AND end_time IS NOT NULL ORDER BY run_id"
        )
        with contextlib.closing(sqlite3.connect(self.home / "master" / "master.db")) as db:
            return [(began, ended) for began, ended in db.execute(query, (trial.id,))]

    def steps(self, trial: Trial, group: str) -> list[int]:
        """Return the steps of a trial's metrics of a group, without superseded ones."""
        return [row["steps_completed"] for row in metric_rows(self.master, [trial.id], group)]

    def logs(self) -> str:
        """Return the output of the newest experiment's trials, for a message."""
        (newest, *_) = self.experiments() or [None]
        return "" if newest is None else "\n".join(str(line["log"]) for line in newest.logs())


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def supervisors(home: Path, experiment_id: int) -> list[int]:
    """Return the supervisor processes of an experiment's trials, by the directory in their arguments."""
    folder = str(home / "master" / "allocations" / f"{experiment_id}.")
    return [int(told.split()[0]) for told in processes_of(home) if "_supervisor" in told and folder in told]


def kill_processes(pids: list[int]) -> None:
    """Kill the processes with SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
