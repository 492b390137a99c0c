"""Trainings of a trial: run by a master of the check's own, stopped by a pause, and read back from its record."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_core._json import str_to_nonfinite
from det_core._standalone.processes import send
from det_core.check_resume._records import ReportedRow, Save, Training, save_of, with_rows
from det_core.check_resume._trainings import (
    OUTPUT,
    PROBE,
    PROGRESS_INTERVAL,
    RESUMED_PLAN,
    Start,
    lay_out,
    processes_of,
    read_notes,
)
from det_core.client import Experiment, Master, Trial
from det_core.errors import DetCoreError
from det_core.protocol.wire import from_wire

POLL_INTERVAL = 0.2
MAX_CHECKPOINTS = 1_000_000
"""Checkpoints of a trial that the master keeps: all."""
HOME = "home"
KILL_TIMEOUT = 60.0
"""Maximum time in seconds in which an experiment ends that is killed."""


@dataclass(frozen=True)
class ExperimentSource:
    """An experiment with one trial, as it is created for each training.

    Attributes:
        config: its complete configuration, so that every training has the same seed.
        directory: the folder that the trial runs in a copy of; None: an empty one.
    """

    config: Mapping[str, Any]
    directory: str | None


class TrialSubject:
    """A trial that is checked, under a master that :meth:`close` stops.

    Args:
        folder: the folder of the check.
        source: the experiment.
    """

    resumes_after_end = False

    def __init__(self, folder: Path, source: ExperimentSource) -> None:
        from det_core.client._embedded import ensure_master
        from det_core.client._master import Address

        self._folder = folder
        self._source = source
        self._experiments: list[Experiment] = []
        slots = max(source.config["resources"]["slots_per_trial"], 1)
        url, token = ensure_master(folder / HOME, options=["--slots", str(slots)])
        self._master = Master(Address(url, token))

    def place(self, path: Path, on_progress: Callable[[int], None]) -> TrialPlace:
        """Return the place of a training."""
        return TrialPlace(path, self._folder / HOME / "checkpoints", self._create, on_progress)

    def close(self) -> None:
        """Kill what still runs, and stop the master."""
        from det_core.client._embedded import stop_master

        for experiment in self._experiments:
            with suppress(DetCoreError, TimeoutError):
                if not experiment.refresh().ended:
                    experiment.kill()
                    experiment.wait(KILL_TIMEOUT)
        self._master.close()
        stop_master(self._folder / HOME)

    def _create(self, probe_dir: Path, max_restarts: int) -> Experiment:
        """Create an experiment whose trial is observed, and keeps all checkpoints in the home of the check."""
        from det_core.client._experiments import create

        config = json.loads(json.dumps(self._source.config))
        config["max_restarts"] = max_restarts
        config["checkpoint_storage"] = {"save_trial_latest": MAX_CHECKPOINTS}
        for lines in config["environment"]["environment_variables"].values():
            lines += [f"DET_CORE_PROBE={PROBE}", f"DET_CORE_PROBE_DIR={probe_dir}"]
        experiment, _ = create(self._master, config, self._source.directory, home=self._folder)
        self._experiments.append(experiment)
        return experiment


class TrialPlace:
    """One training: an experiment, whose trial is started once or twice.

    Args:
        path: the folder for what the probe notes.
        checkpoints: the folder of the master's checkpoints.
        create: creates the experiment, for a folder of the probe and a number of restarts.
        on_progress: called now and then with the last step that has been reported.
    """

    def __init__(
        self,
        path: Path,
        checkpoints: Path,
        create: Callable[[Path, int], Experiment],
        on_progress: Callable[[int], None],
    ) -> None:
        self._path = path
        self._checkpoints = checkpoints
        self._create = create
        self._on_progress = on_progress
        self._experiment: Experiment | None = None
        self._starts = 0
        self._last_line = ""

    def run(self, plan: dict[str, Any], timeout: float | None = None) -> Start:
        """Start the trial, or have it started again, and wait until it has stopped.

        Args:
            plan: what the probe is to do, see :class:`det_core.check_resume._probe.Probe`.
            timeout: maximum time in seconds. Defaults to None: without a limit.
        """
        folder = lay_out(self._path, self._starts, plan)
        self._starts += 1
        began = time.monotonic()
        if self._experiment is None:
            is_restarted = "kill_at" in plan
            if is_restarted:
                lay_out(self._path, 1, RESUMED_PLAN)  # the master starts a killed trial again at once
            self._experiment = self._create(self._path, int(is_restarted))
        elif self._experiment.refresh().state == "PAUSED":
            self._experiment.activate()
        is_killed, is_hung = self._wait(self._experiment, folder, plan, timeout)
        seconds = time.monotonic() - began
        status = int(-signal.SIGKILL)
        if not is_killed and not is_hung:
            status = _status(self._experiment)
        output = self._take_output(self._experiment)
        (folder / OUTPUT).write_text(output, errors="backslashreplace")
        return Start(status, seconds, is_killed, is_hung, (), output, read_notes(folder))

    def read(self, name: str, starts: tuple[Start, ...]) -> Training:
        """Read the training from the record of the master."""
        assert self._experiment is not None
        trial = _trial_of(self._experiment)
        if trial is None or not any(start.notes for start in starts):
            return Training(name, starts, runs=0)
        restored = {
            number: str(note["storage_id"]) for number, start in enumerate(starts) for note in start.noted("restore")
        }
        sizes = tuple(len(start.notes) for start in starts)
        saves = tuple(_saves(trial, self._checkpoints, starts))
        training = Training(name, starts, sizes=sizes, saves=saves, restored=restored)
        return with_rows(training, _rows(self._experiment.master, trial.id))

    def _wait(
        self, experiment: Experiment, folder: Path, plan: dict[str, Any], timeout: float | None
    ) -> tuple[bool, bool]:
        """Wait until the trial has stopped, and return whether it was killed as planned, and whether the time is up."""
        began = shown = time.monotonic()
        is_paused = False
        while not _has_ended(experiment, POLL_INTERVAL):
            now = time.monotonic()
            noted = {note["event"] for note in read_notes(folder).get(0, [])}
            if "kill" in noted and "kill_at" in plan:
                for pid in processes_of(self._path):
                    send(pid, signal.SIGKILL)
                return True, False
            if "pause" in noted and not is_paused:
                experiment.pause()
                is_paused = True
            elif is_paused and _is_stopped(experiment):
                return False, False
            if timeout is not None and now - began > timeout:
                experiment.kill()
                experiment.wait(KILL_TIMEOUT)
                return False, True
            if now - shown >= PROGRESS_INTERVAL:
                shown = now
                self._on_progress(max((trial.steps_completed for trial in experiment.trials()), default=-1))
        return False, False

    def _take_output(self, experiment: Experiment) -> str:
        """Return what the trial has printed since the last call, and why it failed."""
        trial = _trial_of(experiment)
        lines = []
        error = experiment.error
        if trial is not None:
            lines = list(trial.logs(after=self._last_line))
            error = error or trial.error
        if lines:
            self._last_line = lines[-1]["id"]
        return "\n".join([line["log"].rstrip("\n") for line in lines] or [error or ""])


def _trial_of(experiment: Experiment) -> Trial | None:
    """Return the trial as it is now; None: it is not created yet."""
    trials = experiment.trials()
    if not trials:
        return None
    return trials[0].refresh()  # in a list they are without their exit statuses


def _has_ended(experiment: Experiment, timeout: float) -> bool:
    """Return whether an experiment has ended, at most a timeout later."""
    with suppress(TimeoutError):
        experiment.wait(timeout)
    return experiment.ended


def _is_stopped(experiment: Experiment) -> bool:
    """Return whether its trial is paused and has ended; one that still saves has an allocation."""
    return all(trial.state == "PAUSED" and not trial.info.get("allocation_id") for trial in experiment.trials())


def _status(experiment: Experiment) -> int:
    trial = _trial_of(experiment)
    if trial is None or trial.exit_status is None:
        return int(experiment.state == "ERROR")
    return trial.exit_status


def _saves(trial: Trial, checkpoints: Path, starts: tuple[Start, ...]) -> Iterator[Save]:
    for view in reversed(trial.checkpoints()):
        restart = int(str(view["allocation_id"]).rpartition(".")[2]) - 1
        storage_id = str(view["uuid"])
        yield save_of(storage_id, restart, int(view["steps_completed"]), checkpoints / storage_id, starts)


def _rows(master: Master, trial_id: int) -> Iterator[ReportedRow]:
    """Yield the rows of a trial, superseded ones included, in the order in which they were reported."""
    query = {"trialIds": [trial_id], "archived": True}
    with master.lines("trials/metrics/trial_metrics", query) as pages:
        rows = [from_wire(row) for page in pages for row in page["metrics"]]
    for row in sorted(rows, key=lambda row: (row["trial_run_id"], row["end_time"])):
        if row.get("total_batches") is not None:  # the profiler's have none
            metrics = from_wire(row["metrics"])
            yield ReportedRow(
                row["group"], row["total_batches"], str_to_nonfinite(metrics["avg_metrics"]),
                str_to_nonfinite(metrics.get("batch_metrics")), row["trial_run_id"] - 1, not row["archived"],
            )  # fmt: skip
