"""How experiments and trials are told: as JSON, and in the words that people read."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core.cli._say import note, number
from det_core.cli._session import command_for
from det_core.cli._status import DONE, FAILED, of_state

if TYPE_CHECKING:
    from det_core.client import Experiment, Trial

_NAMES = ("id", "name", "state", "progress", "description", "labels", "searcher_type", "num_trials", "priority")


def as_json(experiment: Experiment, *, result: bool = False) -> dict[str, Any]:
    """An experiment; with ``result`` also its best trial and that one's checkpoint."""
    info = experiment.info
    told = {name: info.get(name) for name in _NAMES} | {
        "metric": experiment.metric or None,
        "smaller_is_better": experiment.smaller_is_better,
        "best_trial": info.get("best_trial_id"),
        "best_metric": experiment.best_metric,
        "start_time": info.get("start_time"),
        "end_time": info.get("end_time"),
        "stopping_trials": stopping(experiment),
        "stop_by_time": info.get("stop_by_time"),
        "error": experiment.error,
        "remarks": info.get("remarks") or [],
    }
    if result:
        best, checkpoint = experiment.best_trial, experiment.best_checkpoint()
        told["error"] = experiment.error or failure(experiment)[0]
        told["best_trial"] = None if best is None else trial_json(best)
        told["best_checkpoint"] = None if checkpoint is None else checkpoint["uuid"]
    return told


def trial_json(trial: Trial) -> dict[str, Any]:
    """A trial."""
    info = trial.info
    return {
        "id": trial.id,
        "experiment_id": trial.experiment_id,
        "state": trial.state,
        "hparams": trial.hparams,
        "steps_completed": trial.steps_completed,
        "restarts": trial.restarts,
        "progress": info.get("progress"),
        "best_metric": trial.best_metric,
        "best_validation": trial.best_validation,
        "latest_validation": trial.latest_validation,
        "latest_checkpoint": trial.latest_checkpoint,
        "start_time": info.get("start_time"),
        "end_time": info.get("end_time"),
        "error": trial.error,
    }


def print_result(args: argparse.Namespace, experiment: Experiment) -> None:
    """How an experiment ended: its best trial, that one's checkpoint, and the command to download it."""
    info = experiment.info
    trials = int(info.get("num_trials") or 0)
    counted = "1 trial" if trials == 1 else f"{trials} trials"
    took = duration((info.get("end_time") or 0.0) - (info.get("start_time") or 0.0))
    print(f"experiment {experiment.id} ({experiment.name}): {experiment.state}, {counted} in {took}")
    for name, text in why_failed(args, experiment):
        print(f"{name}: {text}")
    for remark in experiment.info.get("remarks") or ():
        note(f"warning: {remark}")
    best, step = experiment.best_trial, None
    if best is None:
        print(f"no trial has reported the metric {experiment.metric!r} in a validation")
    else:
        value = "-" if best.best_metric is None else number(best.best_metric)
        step = (best.best_validation or {}).get("total_batches")
        print(f"best trial: {best.id}, {experiment.metric} {value} at step {step}: {settings(best.hparams)}")
    checkpoint = experiment.best_checkpoint()
    if checkpoint is not None:
        place = (checkpoint["training"].get("trialId"), checkpoint["steps_completed"])
        is_its = best is not None and place == (best.id, step)
        where = "its checkpoint" if is_its else f"best checkpoint (trial {place[0]}, step {place[1]})"
        print(f"{where}: {checkpoint['uuid']}")
        print(f"to download it: {command_for(args, 'experiment', 'download-checkpoint', experiment.id, 'DIR')}")


def why_failed(args: argparse.Namespace, experiment: Experiment) -> list[tuple[str, str]]:
    """Why an experiment ended in ERROR, with the name of each line: what failed, and the command that shows more."""
    said, trial = failure(experiment)
    found = [("error", text) for text in dict.fromkeys((experiment.error, said)) if text]
    return found + ([("for more", command_for(args, "trial", "logs", trial))] if trial is not None else [])


def failure(experiment: Experiment) -> tuple[str | None, int | None]:
    """What the last trial that failed of an experiment in ERROR has said last, and which one that is."""
    if experiment.state != "ERROR":
        return None, None
    failed = [trial for trial in experiment.trials() if trial.state == "ERROR"]
    if not failed:
        return None, None
    trial = failed[-1].refresh()
    first, *more = (trial.error or "it ended in ERROR").splitlines()
    last = f": {more[-1].strip()}" if more else ""
    return f"trial {trial.id}: {first_line(first)}{last}", trial.id


def outcome(experiment: Experiment) -> int:
    """The exit status for how an experiment has ended; a search that cannot say what was best has failed."""
    info = experiment.info
    in_vain = info.get("best_trial_id") is None and info.get("searcher_type") != "single" and info.get("remarks")
    return of_state(experiment.state) or (FAILED if in_vain else DONE)


def state_of(trial: Trial) -> str:
    """A trial's state; one that has done its work, and may get more from the search, is WAITING.

    One that is to pause and still runs is PAUSING.
    """
    if trial.state == "PAUSED" and trial.info.get("allocation_id"):
        return "PAUSING"
    return "WAITING" if trial.state == "ACTIVE" and trial.info.get("parked") else trial.state


def state_of_all(experiment: Experiment) -> str:
    """An experiment's state; one that is to pause, and whose trials still run, is PAUSING."""
    return "PAUSING" if experiment.state == "PAUSED" and stopping(experiment) else experiment.state


def stopping(experiment: Experiment) -> int:
    """How many trials were told to stop, and still run."""
    return int(experiment.info.get("stopping_trials") or 0)


def still_saves(experiment: Experiment) -> str:
    """Who of an experiment that is to pause or to end still runs, and how long that may last; "" if nobody."""
    count, until = stopping(experiment), experiment.info.get("stop_by_time")
    if not count or not until or experiment.state == "ACTIVE" or experiment.ended:
        return ""
    left = f"in {duration(until - time.time())}" if until > time.time() else "now"
    who = "1 trial still saves; it is" if count == 1 else f"{count} trials still save; they are"
    return f"{who} killed {left} at the latest (preemption_timeout)"


def first_line(error: str) -> str:
    """The first line of an error, without the name of the allocation before it and the output after it."""
    line = error.split("\n", 1)[0].removesuffix(" its last lines:").rstrip("; ")
    return re.sub(r"^\d+\.\S+\.\d+: ", "", line)


def settings(hparams: Mapping[str, Any], prefix: str = "") -> str:
    """Hyperparameters on a line."""
    words = []
    for key, value in sorted(hparams.items()):
        name = prefix + key
        words.append(settings(value, name + ".") if isinstance(value, Mapping) else f"{name}={number(value)}")
    return ", ".join(word for word in words if word) or "no hyperparameters"


def duration(seconds: float) -> str:
    """A time, short."""
    whole = int(max(seconds, 0.0))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{max(seconds, 0.0):.1f} s"
