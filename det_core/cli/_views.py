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
    counted,
    duration,
    note,
    number,
    print_rows,
    say,
)

if TYPE_CHECKING:
    from det_core.client import Experiment, Trial

_STATUSES = {"COMPLETED": DONE, "CANCELED": CANCELED}
_PLAIN_LEVELS = ("", "UNSPECIFIED", "INFO")


def experiment_json(experiment: Experiment, *, result: bool = False) -> dict[str, Any]:
    """Return an experiment for a program; with ``result`` also its best trial and that one's checkpoint."""
    record = experiment.record
    names = ("id", "name", "state", "progress", "description", "searcher_type", "num_trials", "priority",
             "smaller_is_better", "best_metric", "start_time", "end_time", "stopping_trials", "stop_by_time", "error",
             "remarks")  # fmt: skip
    view = {name: getattr(record, name) for name in names}
    view["metric"] = experiment.metric or None
    view["best_trial"] = record.best_trial_id
    if result:
        view["error"] = experiment.error or failure(experiment)[0]
        if best := experiment.best_trial:
            view["best_trial"] = trial_json(best)
        checkpoint = experiment.best_checkpoint() or {}
        view["best_checkpoint"] = checkpoint.get("uuid")
    return view


def trial_json(trial: Trial) -> dict[str, Any]:
    """Return a trial for a program."""
    names = ("id", "experiment_id", "state", "hparams", "steps_completed", "restarts", "best_metric",
             "best_validation", "latest_validation", "latest_checkpoint", "error")  # fmt: skip
    of_record = {name: getattr(trial.record, name) for name in ("progress", "start_time", "end_time")}
    return {name: getattr(trial, name) for name in names} | of_record


def print_result(experiment: Experiment) -> None:
    """Print how an experiment ended: its best trial, that one's checkpoint, and the command to download it."""
    record = experiment.record
    took = duration((record.end_time or 0.0) - record.start_time)
    say(f"experiment {record.id} ({record.name}): {record.state}, {counted(record.num_trials, 'trial')} in {took}")
    for name, text in failure_facts(experiment):
        say(f"{name}: {text}")
    for remark in record.remarks:
        note(f"warning: {remark}")
    best = experiment.best_trial
    if best is None:
        say(f"no trial has reported the metric {experiment.metric!r} in a validation")
    else:
        step = (best.best_validation or {}).get("total_batches")
        value = f"{experiment.metric} {number(best.best_metric)}"
        say(f"best trial: {best.id}, {value} at step {step}: {settings(best.hparams)}")
    # Of another trial or step, where retention has deleted the best trial's, or it saves and validates apart.
    if checkpoint := experiment.best_checkpoint():
        where = f"trial {checkpoint['training'].get('trialId')}, step {checkpoint['steps_completed']}"
        say(f"best checkpoint ({where}): {checkpoint['uuid']}")
        say(f"to download it: {command_for('experiment', 'download-checkpoint', experiment.id, 'DIR')}")


def failure_facts(experiment: Experiment) -> list[tuple[str, str]]:
    """Return why an experiment ended in ERROR, and the command that shows more."""
    text, trial = failure(experiment)
    # Often both are the same: the experiment has the error of its only trial.
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
    text = f"trial {trial.id}: {first_line(first)}"
    if more:
        text += f": {more[-1].strip()}"  # of a traceback the exception
    return text, trial.id


def exit_status(experiment: Experiment) -> int:
    """Return the exit status for how an experiment ended; a search that cannot tell what was best has failed."""
    record = experiment.record
    status = _STATUSES.get(record.state, ENDED_IN_ERROR)
    # Its trials ran well, but reported another metric than the one it searches for.
    if status == DONE and record.best_trial_id is None and record.searcher_type != "single" and record.remarks:
        return FAILED
    return status


def trial_state(trial: Trial) -> str:
    """Return a trial's state: PAUSING if it is to pause and still runs, WAITING if its search may give it more."""
    if trial.state == "PAUSED" and trial.record.allocation_id:
        return "PAUSING"
    if trial.state == "ACTIVE" and trial.record.parked:
        return "WAITING"
    return trial.state


def experiment_state(experiment: Experiment) -> str:
    """Return an experiment's state: PAUSING if it is to pause and trials still run."""
    if experiment.state == "PAUSED" and experiment.record.stopping_trials:
        return "PAUSING"
    return experiment.state


def saving_trials(experiment: Experiment) -> str:
    """Return which trials of an experiment that stops still save, and how long they may; empty if none."""
    count = experiment.record.stopping_trials
    deadline = experiment.record.stop_by_time
    # An ACTIVE one stops single trials, which its search has closed: nobody waits for that.
    if not count or not deadline or deadline < time.time() or experiment.state == "ACTIVE" or experiment.ended:
        return ""
    left = duration(deadline - time.time())
    return f"{counted(count, 'trial')} to save; killed in {left} at the latest (preemption_timeout)"


def first_line(error: str) -> str:
    """Return the first line of an error, without the name of the allocation and the output after it."""
    line = error.split("\n", 1)[0].removesuffix(" its last lines:").rstrip("; ")
    return re.sub(r"^\d+\.\S+\.\d+: ", "", line)


def settings(hparams: Mapping[str, Any]) -> str:
    """Return hyperparameters on a line."""
    from det_core.client._table import spread

    return ", ".join(f"{key}={number(value)}" for key, value in sorted(spread(hparams).items())) or "no hyperparameters"


def print_trials(experiment: Experiment, trials: Iterable[Trial]) -> None:
    """Print trials as a table."""
    head = ("TRIAL", "STATE", f"BEST {experiment.metric}".rstrip(), "STEPS", "RESTARTS", "HYPERPARAMETERS")
    rows = [(t.id, trial_state(t), t.best_metric, t.steps_completed, t.restarts, settings(t.hparams)) for t in trials]
    print_rows(head, rows, empty=f"experiment {experiment.id} has no trials yet")


def line_text(line: Mapping[str, Any]) -> str:
    """Return a log line as it was printed, with its rank and its level before it."""
    text = str(line["log"]).rstrip("\n")
    if (level := _level(line)) not in _PLAIN_LEVELS:
        text = f"{level}: {text}"
    if (rank := line.get("rank_id")) is not None:
        text = f"[rank={rank}] {text}"
    return text


def print_line(line: Mapping[str, Any]) -> None:
    """Print a log line among those of other trials."""
    print(f"[trial {line.get('trial_id')}] {line_text(line)}", flush=True)


def print_line_as_json(line: Mapping[str, Any]) -> None:
    """Print a log line as an object."""
    import orjson  # here, as only programs need it

    view = {
        "trial": line.get("trial_id"),
        "rank": line.get("rank_id"),
        "time": line.get("timestamp"),
        "level": _level(line),
        "stream": line.get("stdtype"),
        "text": str(line["log"]).rstrip("\n"),
    }
    print(orjson.dumps(view).decode(), flush=True)


def _level(line: Mapping[str, Any]) -> str:
    return str(line.get("level", "")).removeprefix("LOG_LEVEL_")
