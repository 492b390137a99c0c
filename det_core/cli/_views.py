"""Experiments and trials as JSON, and in the words that people read."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from det_core.cli._options import command_for
from det_core.cli._output import (
    CANCELED,
    DONE,
    ENDED_IN_ERROR,
    FAILED,
    duration,
    note,
    number,
    number_or_dash,
    print_table,
    say,
)

if TYPE_CHECKING:
    from det_core.client import Experiment, Trial

_STATUSES = {"COMPLETED": DONE, "CANCELED": CANCELED}
_PLAIN_LEVELS = ("", "UNSPECIFIED", "INFO")


def experiment_json(experiment: Experiment, *, result: bool = False) -> dict[str, Any]:
    """Return an experiment for a program; with ``result`` also its best trial and that one's checkpoint."""
    info = experiment.info
    names = ("id", "name", "state", "progress", "description", "labels", "searcher_type", "num_trials", "priority")
    view = {name: info.get(name) for name in names} | {
        "metric": experiment.metric or None,
        "smaller_is_better": experiment.smaller_is_better,
        "best_trial": info.get("best_trial_id"),
        "best_metric": experiment.best_metric,
        "start_time": info.get("start_time"),
        "end_time": info.get("end_time"),
        "stopping_trials": stopping_trials(experiment),
        "stop_by_time": info.get("stop_by_time"),
        "error": experiment.error,
        "remarks": info.get("remarks") or [],
    }
    if result:
        best = experiment.best_trial
        checkpoint = experiment.best_checkpoint()
        view["error"] = experiment.error or failure(experiment)[0]
        view["best_trial"] = None if best is None else trial_json(best)
        view["best_checkpoint"] = None if checkpoint is None else checkpoint["uuid"]
    return view


def trial_json(trial: Trial) -> dict[str, Any]:
    """Return a trial for a program."""
    names = ("id", "experiment_id", "state", "hparams", "steps_completed", "restarts", "best_metric",
             "best_validation", "latest_validation", "latest_checkpoint", "error")  # fmt: skip
    of_master = {name: trial.info.get(name) for name in ("progress", "start_time", "end_time")}
    return {name: getattr(trial, name) for name in names} | of_master


def print_result(experiment: Experiment) -> None:
    """Print how an experiment ended: its best trial, that one's checkpoint, and the command to download it."""
    info = experiment.info
    trials = int(info.get("num_trials") or 0)
    count = "1 trial" if trials == 1 else f"{trials} trials"
    took = duration((info.get("end_time") or 0.0) - (info.get("start_time") or 0.0))
    say(f"experiment {experiment.id} ({experiment.name}): {experiment.state}, {count} in {took}")
    for name, text in failure_facts(experiment):
        say(f"{name}: {text}")
    for remark in info.get("remarks") or ():
        note(f"warning: {remark}")
    best = experiment.best_trial
    step = None
    if best is None:
        say(f"no trial has reported the metric {experiment.metric!r} in a validation")
    else:
        step = (best.best_validation or {}).get("total_batches")
        value = number_or_dash(best.best_metric)
        say(f"best trial: {best.id}, {experiment.metric} {value} at step {step}: {settings(best.hparams)}")
    checkpoint = experiment.best_checkpoint()
    if checkpoint is not None:
        trial = checkpoint["training"].get("trialId")
        saved = checkpoint["steps_completed"]
        where = f"best checkpoint (trial {trial}, step {saved})"
        if best is not None and (trial, saved) == (best.id, step):
            where = "its checkpoint"
        say(f"{where}: {checkpoint['uuid']}")
        say(f"to download it: {command_for('experiment', 'download-checkpoint', experiment.id, 'DIR')}")


def failure_facts(experiment: Experiment) -> list[tuple[str, str]]:
    """Return why an experiment ended in ERROR, and the command that shows more."""
    text, trial = failure(experiment)
    facts = [("error", cause) for cause in dict.fromkeys((experiment.error, text)) if cause]
    if trial is not None:
        facts.append(("for more", command_for("trial", "logs", trial)))
    return facts


def failure(experiment: Experiment) -> tuple[str | None, int | None]:
    """Return the error and the number of the last failed trial of an experiment in ERROR."""
    if experiment.state != "ERROR":
        return None, None
    failed = [trial for trial in experiment.trials() if trial.state == "ERROR"]
    if not failed:
        return None, None
    trial = failed[-1].refresh()  # trials in a list lack the last lines of their output
    first, *more = (trial.error or "it ended in ERROR").splitlines()
    last = f": {more[-1].strip()}" if more else ""
    return f"trial {trial.id}: {first_line(first)}{last}", trial.id


def exit_status(experiment: Experiment) -> int:
    """Return the exit status for how an experiment ended; a search that cannot tell what was best has failed."""
    info = experiment.info
    in_vain = info.get("best_trial_id") is None and info.get("searcher_type") != "single" and info.get("remarks")
    return _STATUSES.get(experiment.state, ENDED_IN_ERROR) or (FAILED if in_vain else DONE)


def trial_state(trial: Trial) -> str:
    """Return a trial's state: PAUSING if it is to pause and still runs, WAITING if its search may give it more."""
    if trial.state == "PAUSED" and trial.info.get("allocation_id"):
        return "PAUSING"
    if trial.state == "ACTIVE" and trial.info.get("parked"):
        return "WAITING"
    return trial.state


def experiment_state(experiment: Experiment) -> str:
    """Return an experiment's state: PAUSING if it is to pause and trials still run."""
    return "PAUSING" if experiment.state == "PAUSED" and stopping_trials(experiment) else experiment.state


def stopping_trials(experiment: Experiment) -> int:
    """Return how many trials were asked to stop, and still run."""
    return int(experiment.info.get("stopping_trials") or 0)


def saving_trials(experiment: Experiment) -> str:
    """Return which trials of an experiment that stops still save, and how long they may; empty if none."""
    count = stopping_trials(experiment)
    deadline = experiment.info.get("stop_by_time")
    if not count or not deadline or experiment.state == "ACTIVE" or experiment.ended:
        return ""
    left = f"in {duration(deadline - time.time())}" if deadline > time.time() else "now"
    trials = "1 trial still saves; it is" if count == 1 else f"{count} trials still save; they are"
    return f"{trials} killed {left} at the latest (preemption_timeout)"


def first_line(error: str) -> str:
    """Return the first line of an error, without the name of the allocation and the output after it."""
    line = error.split("\n", 1)[0].removesuffix(" its last lines:").rstrip("; ")
    return re.sub(r"^\d+\.\S+\.\d+: ", "", line)


def settings(hparams: Mapping[str, Any]) -> str:
    """Return hyperparameters on a line."""
    return ", ".join(_settings(hparams, "")) or "no hyperparameters"


def _settings(hparams: Mapping[str, Any], prefix: str) -> list[str]:
    words = []
    for key, value in sorted(hparams.items()):
        if isinstance(value, Mapping):
            words += _settings(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={number(value)}")
    return words


def rank_trials(experiment: Experiment, trials: Iterable[Trial]) -> list[Trial]:
    """Return trials with the best value first, those without one last."""
    sign = 1 if experiment.smaller_is_better else -1

    def key(trial: Trial) -> tuple[bool, float, int]:
        best = trial.best_metric
        if best is None or best != best:  # NaN
            return True, 0.0, trial.id
        return False, sign * best, trial.id

    return sorted(trials, key=key)


def print_trials(experiment: Experiment, trials: Iterable[Trial]) -> None:
    """Print trials as a table."""
    rows = [
        (t.id, trial_state(t), number_or_dash(t.best_metric), t.steps_completed, t.restarts, settings(t.hparams))
        for t in trials
    ]
    print_table(("TRIAL", "STATE", f"BEST {experiment.metric}".rstrip(), "STEPS", "RESTARTS", "HYPERPARAMETERS"), rows)


def line_text(line: Mapping[str, Any]) -> str:
    """Return a log line as it was printed, with its rank and its level before it."""
    rank = line.get("rank_id")
    level = _level(line)
    before = "" if rank is None else f"[rank={rank}] "
    return before + ("" if level in _PLAIN_LEVELS else f"{level}: ") + str(line["log"]).rstrip("\n")


def line_head(trial: Trial) -> str:
    """Return what is printed before each line of a trial among those of others."""
    return f"[trial {trial.id}] "


def print_line(trial: Trial, line: Mapping[str, Any], *, as_json: bool = False, head: bool = True) -> None:
    """Print a log line.

    Args:
        trial: trial that printed it.
        line: line of the master's answer.
        as_json: whether to print an object.
        head: whether to print the trial's number before it.
    """
    if as_json:
        import orjson

        view = {
            "trial": trial.id,
            "rank": line.get("rank_id"),
            "time": line.get("timestamp"),
            "level": _level(line),
            "stream": line.get("stdtype"),
            "text": str(line["log"]).rstrip("\n"),
        }
        print(orjson.dumps(view).decode(), flush=True)
    else:
        print((line_head(trial) if head else "") + line_text(line), flush=True)


def _level(line: Mapping[str, Any]) -> str:
    return str(line.get("level", "")).removeprefix("LOG_LEVEL_")
