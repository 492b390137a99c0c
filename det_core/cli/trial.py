"""``det-core trial``: look at single trials."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._groups import Group
from det_core.cli._options import (
    ABOUT_MASTERS,
    experiment_argument,
    find_experiment,
    find_trial,
    follow_option,
    json_option,
    on_master,
    tail_option,
    trial_argument,
)
from det_core.cli._output import (
    Failure,
    note,
    number,
    print_facts,
    print_json,
    print_table,
    say,
    size,
    when,
)
from det_core.cli._views import line_text, print_line_as_json, print_trials, trial_json, trial_state

if TYPE_CHECKING:
    from det_core.client import Master, Trial

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_EXAMPLES = f"""\
examples:
  det-core trial list 3                      trials of experiment 3, the best first
  det-core trial describe 12
  det-core trial logs 12 -f
  det-core trial metrics 12 --group validation --csv > validation.csv
  det-core t kill 12                         `t` is short for `trial`

{ABOUT_MASTERS}"""


@click.group("trial", cls=Group, epilog=_EXAMPLES)
def command() -> None:
    """Look at single trials. EXPERIMENT is an experiment's number or `latest`, TRIAL a trial's number."""


@command.command("list")
@experiment_argument
@json_option
@on_master
def list_trials(master: Master, experiment: int | str, as_json: bool) -> None:
    """List the trials of an experiment, the best first."""
    found = find_experiment(master, experiment)
    trials = found.trials(best_first=True)
    if as_json:
        print_json([trial_json(trial) for trial in trials])
    else:
        print_trials(found, trials)


@command.command()
@trial_argument
@json_option
@on_master
def describe(master: Master, trial: int, as_json: bool) -> None:
    """Describe one trial: state, hyperparameters, validations, checkpoints."""
    found = find_trial(master, trial)
    checkpoints = [c for c in found.checkpoints() if c["state"] != "DELETED"]
    if as_json:
        keys = ("uuid", "state", "steps_completed", "report_time", "metadata")
        views = [{key: c.get(key) for key in keys} | {"size": int(c["size"])} for c in checkpoints]
        print_json({**trial_json(found), "checkpoints": views})
        return
    print_facts(_facts(found))
    if checkpoints:
        print("\ncheckpoints")
        rows = [(c["uuid"], c["steps_completed"], size(int(c["size"])), when(c["report_time"])) for c in checkpoints]
        print_table(("CHECKPOINT", "STEP", "SIZE", "SAVED"), rows)


def _facts(trial: Trial) -> Iterator[tuple[str, object]]:
    record = trial.record
    state = trial_state(trial)
    if record.parked:
        state += " (for the search)"
    yield "trial", trial.id
    yield "experiment", trial.experiment_id
    yield "state", state
    if record.stop_by_time:
        yield "killed by", when(record.stop_by_time)
    yield "started", when(record.start_time)
    yield "ended", when(record.end_time)
    yield "restarts", trial.restarts
    yield "steps completed", trial.steps_completed
    yield "status", record.status or None
    yield "error", trial.error
    for key, value in sorted(trial.hparams.items()):
        yield f"hparams.{key}", number(value)
    for name, validation in (("latest", trial.latest_validation), ("best", trial.best_validation)):
        if validation:
            metrics = ", ".join(f"{key} {number(value)}" for key, value in sorted(validation["metrics"].items()))
            yield f"{name} validation", f"step {validation.get('total_batches')}: {metrics}"


@command.command()
@trial_argument
@follow_option
@tail_option
@click.option("--level", type=click.Choice(_LEVELS, case_sensitive=False), help="Lowest level.")
@click.option("--rank", type=click.IntRange(0, 999_999_999), metavar="N", help="Lines of one rank alone.")
@json_option
@on_master
def logs(
    master: Master, trial: int, follow: bool, tail: int | None, level: str | None, rank: int | None, as_json: bool
) -> None:
    """Print the log of a trial."""
    found = find_trial(master, trial)
    for line in found.logs(follow=follow, tail=tail, level=level, rank=rank):
        if as_json:
            print_line_as_json(line)
        else:
            print(line_text(line), flush=True)


@command.command()
@trial_argument
@click.option("--group", "-g", help="One metric group, such as training or validation (default: all).")
@click.option("--csv", "as_csv", is_flag=True, help="A line for each step, every digit of each number.")
@json_option
@on_master
def metrics(master: Master, trial: int, group: str | None, as_csv: bool, as_json: bool) -> None:
    """Print the metrics of a trial as a table."""
    from det_core.client._experiments import metric_rows

    found = find_trial(master, trial)
    rows = list(metric_rows(master, [found.id], group))
    # Only then: to read all groups takes as long as the trial has reported.
    if group and not rows and (groups := {row["group"] for row in metric_rows(master, [found.id], None)}):
        raise Failure(f"trial {found.id} has reported no group {group!r}: there are {', '.join(sorted(groups))}")
    if as_json:
        print_json(rows)
    elif not rows:
        note(f"trial {found.id} has reported no metrics")
    else:
        _print_metrics(rows, as_csv)


def _print_metrics(rows: list[dict[str, Any]], as_csv: bool) -> None:
    from det_core.cli.runs import write_csv
    from det_core.client._table import spread

    head = ["group", "steps_completed"]
    flat = [{name: row[name] for name in head} | spread(row["metrics"]) for row in rows]
    columns = list(dict.fromkeys([*head, *(name for row in flat for name in row)]))
    if as_csv:
        write_csv(columns, flat, sys.stdout)
        return
    # Metrics keep their case: loss and Loss are two.
    titles = [*map(str.upper, head), *columns[len(head) :]]
    print_table(titles, [[row.get(name) for name in columns] for row in flat])


@command.command()
@trial_argument
@json_option
@on_master
def kill(master: Master, trial: int, as_json: bool) -> None:
    """Kill a trial for good; the search goes on without it."""
    found = find_trial(master, trial)
    found.kill()
    if as_json:
        print_json(trial_json(found))
    else:
        say(f"trial {found.id}: {found.state}")
