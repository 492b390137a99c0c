"""``det-core experiment``: create, watch and steer experiments."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from det_core.cli._groups import Group
from det_core.cli._options import (
    ABOUT_MASTERS,
    COUNT,
    TRIAL,
    command_for,
    config_file_argument,
    config_option,
    experiment_argument,
    experiments_argument,
    find_experiment,
    json_option,
    limit_of,
    limit_option,
    on_master,
    tail_option,
    yes_option,
)
from det_core.cli._output import (
    FAILED,
    INVALID,
    NOT_ENDED,
    STATUSES,
    Failure,
    confirm,
    counted,
    error,
    note,
    note_if_slow,
    number,
    print_facts,
    print_json,
    print_rows,
    print_table,
    say,
    when,
)
from det_core.cli._views import (
    exit_status,
    experiment_json,
    experiment_state,
    failure_facts,
    print_line,
    print_line_as_json,
    print_result,
    print_trials,
    saving_trials,
    settings,
    trial_json,
)
from det_core.cli.completion import complete_trials

if TYPE_CHECKING:
    from det_core.client import Experiment, Master
    from det_core.config import Experiment as ExperimentConfig

SHOWN_TRIALS = 20
PACKING_DELAY = 3.0
"""Seconds that files may take to be packed and sent before a note says so."""
STATES = ("ACTIVE", "PAUSED", "STOPPING_CANCELED", "STOPPING_KILLED", "STOPPING_COMPLETED", "STOPPING_ERROR",
          "COMPLETED", "CANCELED", "ERROR")  # fmt: skip
STATE = click.Choice(STATES, case_sensitive=False)
_EXAMPLES = f"""\
examples:
  det-core experiment create search.yaml . --follow        run a search on the files of this directory, and watch it
  det-core experiment create search.yaml . --config searcher.max_trials=8
  det-core experiment list
  det-core experiment logs latest -f                       `latest` is the newest experiment
  det-core experiment pause 3                              its trials save and stop; `activate 3` resumes them
  det-core experiment download-checkpoint 3 model          the best checkpoint, into the directory model
  det-core e wait 3 && echo it is done                     `e` is short for `experiment`

{STATUSES}

{ABOUT_MASTERS}"""
_CREATE_EXAMPLES = """\
examples:
  det-core experiment create search.yaml .
  det-core experiment create search.yaml . --follow
  det-core experiment create search.yaml . --config hyperparameters.lr=0.01 --config searcher.max_trials=8
  ID=$(det-core experiment create search.yaml . --json | jq .id)

Each trial runs in a copy of DIR as it is now, without what DIR/.detignore names (patterns as in .gitignore), .git and
virtual environments. Without DIR it runs in an empty directory."""
_CONTINUE_EXAMPLES = """\
examples:
  det-core experiment continue 3                                     after an error that was outside of it
  det-core experiment continue 3 --follow
  det-core experiment continue 3 --config searcher.max_length=100    a single trial, trained longer

Trials that are incomplete resume from their latest checkpoints."""
_DOWNLOAD_EXAMPLES = """\
examples:
  det-core experiment download-checkpoint 3 model                    the best one
  det-core experiment download-checkpoint 3 model --trial 12         the newest one of a trial
  det-core experiment download-checkpoint 3 model --checkpoint 3f2a  one by the beginning of its ID

The best checkpoint is the one with the best value of the searched metric; where none has one, the newest. It is read
from where the trials have put it, with the keys of this machine, and compared with its manifest."""
_STEER_EPILOG = """\
Several experiments are steered one after the other; one that cannot be does not keep the others. An experiment that has
ended cannot be paused or activated (`continue` resumes it); to cancel or kill it changes nothing, and succeeds."""

watch_option = click.option("--follow", "-f", is_flag=True, help="Watch it until it ends, and print the best trial.")


@click.group("experiment", cls=Group, epilog=_EXAMPLES)
def command() -> None:
    """Create, watch and steer experiments. EXPERIMENT is an experiment's number, or `latest`."""


@command.command(epilog=_CREATE_EXAMPLES)
@config_file_argument
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(exists=True, file_okay=False))
@watch_option
@config_option
@click.option("--slots", type=COUNT, metavar="N", help="Slots (GPUs) of each trial: resources.slots_per_trial.")
@click.option("--paused", is_flag=True, help="Only create it; `activate` starts it.")
@click.option("--check", is_flag=True, help="Only check whether it could be created.")
@json_option
@on_master
def create(
    master: Master,
    config_file: str,
    directory: str | None,
    config: Sequence[str],
    slots: int | None,
    follow: bool,
    paused: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Run the experiment that the file CONFIG describes, on the files of DIR."""
    overrides = [*config, *slots_override(slots)]
    experiment = submit(master, config_file, directory, overrides, activate=not paused, validate_only=check)
    if check and as_json:
        print_json({"config": experiment.config})
    elif check:
        say(f"{config_file}: this can be run")
    elif follow and not paused:
        return watch(experiment, as_json)
    else:
        print_started(experiment, as_json)
    return 0


def slots_override(slots: int | None) -> list[str]:
    """Return --slots as an override of a configuration."""
    if slots is None:
        return []
    return [f"resources.slots_per_trial={slots}"]


def submit(
    master: Master, config: str | dict[str, Any], directory: str | None, overrides: list[str], **options: bool
) -> Experiment:
    """Create an experiment and print its warnings, or end the command with the mistakes of its configuration."""
    from det_core.client._experiments import create
    from det_core.client._runs import home_of
    from det_core.errors import ExperimentInvalid

    # A context must not hold the home directory, with all its checkpoints.
    home = home_of(click.get_current_context().params.get("home"))
    try:
        with note_if_slow("packing the files and sending them to the master …", PACKING_DELAY):
            experiment, warnings = create(master, config, directory, overrides=overrides, home=home, **options)
    except ExperimentInvalid as e:
        _fail_with_mistakes(e.problems, config)
    for warning in warnings:
        note(f"warning: {warning}")
    return experiment


def parse_config(config: str | dict[str, Any], overrides: Sequence[str]) -> ExperimentConfig:
    """Read a configuration, of a file if it is a path, as a master would; else end the command with its mistakes."""
    from det_core.config import parse_experiment
    from det_core.errors import ConfigError

    try:
        if isinstance(config, str):
            return parse_experiment(Path(config).read_text(encoding="utf-8"), overrides=overrides)
        return parse_experiment(config, overrides=overrides)
    except UnicodeDecodeError:
        text = f"{config} is not text: name the experiment's configuration, a YAML or JSON file"
        raise Failure(text, INVALID) from None
    except ConfigError as e:
        _fail_with_mistakes(e.errors, config)


def _fail_with_mistakes(problems: Sequence[object], config: object) -> NoReturn:
    """Print the mistakes in a configuration, a line for each; one of the whole file names it."""
    for problem in problems:
        text = str(problem)
        # The master got the text alone, and does not know the file's name.
        if isinstance(config, str) and text.startswith("the experiment file:"):
            text = config + text.removeprefix("the experiment file")
        error(text)
    raise click.exceptions.Exit(INVALID)


def print_started(experiment: Experiment, as_json: bool, how: str = "created") -> None:
    """Print an experiment that was created or continued, and the command that watches it."""
    if as_json:
        print_json(experiment_json(experiment))
        return
    say(f"{how} experiment {experiment.id} ({experiment.name})")
    note(f"to watch it: {command_for('experiment', 'logs', experiment.id, '-f')}")


def watch(experiment: Experiment, as_json: bool = False, tail: int | None = None) -> int:
    """Follow an experiment to its end and print its result; return the exit status for it."""
    from det_core.cli._follow import follow

    follow(experiment, None if as_json else print_line, tail=tail, with_states=not as_json)
    if as_json:
        print_json(experiment_json(experiment, result=True))
    else:
        print_result(experiment)
    return exit_status(experiment)


@command.command("list")
@click.option("--name", help="Only those of this name.")
@click.option("--state", type=STATE, metavar="STATE", help=f"Only those in this state: {', '.join(STATES)}.")
@limit_option
@json_option
@on_master
def list_experiments(master: Master, name: str | None, state: str | None, limit: int | None, as_json: bool) -> None:
    """List experiments, newest first."""
    from det_core.client._experiments import Experiment
    from det_core.client._master import list_rows

    shown = limit_of(limit, as_json)
    query: dict[str, Any] = {"sortBy": "SORT_BY_START_TIME", "orderBy": "ORDER_BY_DESC", "name": name}
    query["states"] = list(filter(None, [state]))
    older = 0
    # The total comes with the page: what is older is counted, not read.
    if shown:
        page = master.get("experiments", limit=shown, **query)
        views = page["experiments"]
        older = page["pagination"]["total"] - len(views)
    else:
        views = list_rows(master, "experiments", **query)
    found = [Experiment(master, view) for view in views]
    if as_json:
        print_json([experiment_json(e) for e in found])
        return
    head = ("ID", "NAME", "STATE", "PROGRESS", "TRIALS", "BEST", "STARTED")
    print_rows(head, map(_row, found), empty=f"no experiments at {master.url}", hidden=older)


def _row(e: Experiment) -> tuple[object, ...]:
    best = "-"
    if e.best_metric is not None:
        best = f"{e.metric} {number(e.best_metric)}"
    record = e.record
    return (e.id, e.name, experiment_state(e), f"{e.progress:.0%}", record.num_trials, best, when(record.start_time))


@command.command()
@experiment_argument
@json_option
@on_master
def describe(master: Master, experiment: int | str, as_json: bool) -> None:
    """Describe one experiment: its state, its trials, its search."""
    found = find_experiment(master, experiment)
    trials = found.trials(best_first=True)
    search: dict[str, Any] = {}
    if not found.record.unmanaged:
        search = found.search()
    if as_json:
        more = {"config": found.config, "trials": [trial_json(t) for t in trials], "search": search}
        print_json({**experiment_json(found, result=True), **more})
        return
    print_facts(_facts(found))
    if rungs := list(_rungs(found, search.get("rungs"))):
        print("\nrungs")
        print_table(("BRACKET", "RUNG", "LENGTH", "ENDED", "PROMOTED", "UNDER WAY", "BEST"), rungs)
    if trials:
        print("\ntrials, the best first")
        print_trials(found, trials[:SHOWN_TRIALS])
        if len(trials) > SHOWN_TRIALS:
            note(f"{len(trials) - SHOWN_TRIALS} more: {command_for('trial', 'list', found.id)}")
    if found.best_checkpoint() is not None:
        download = command_for("experiment", "download-checkpoint", found.id, "DIR")
        print(f"\nto download the best checkpoint: {download}")


def _facts(experiment: Experiment) -> Iterator[tuple[str, object]]:
    record = experiment.record
    yield "experiment", experiment.id
    yield "name", experiment.name
    yield "state", ": ".join(filter(None, [experiment_state(experiment), saving_trials(experiment)]))
    yield "progress", f"{experiment.progress:.0%}"
    search = "none; it is run by others"
    if experiment.metric:
        best = "smallest" if experiment.smaller_is_better else "largest"
        search = f"{record.searcher_type} by {experiment.metric}, the {best} is best"
    yield "search", search
    yield "priority", record.priority
    yield "started", when(record.start_time)
    yield "ended", when(record.end_time)
    yield "description", record.description or None
    yield from failure_facts(experiment)
    trial = experiment.best_trial
    if trial is not None and trial.best_metric is not None:
        yield "best", f"trial {trial.id}, {experiment.metric} {number(trial.best_metric)}"
        yield "best hparams", settings(trial.hparams)
    for warning in (*record.warnings, *record.remarks):
        yield "warning", warning


def _rungs(experiment: Experiment, brackets: Any) -> Iterator[tuple[object, ...]]:
    """Yield the rungs of a search as rows; a search without any, or with a form of its own, has none."""
    from det_core._json import str_to_nonfinite

    # A search method of a user's may return what it likes.
    if not isinstance(brackets, list):
        return
    best_of = min if experiment.smaller_is_better else max
    for bracket in brackets:
        for rung in bracket.get("rungs") or ():
            entries = rung["entries"]
            metrics = [float(str_to_nonfinite(entry["metric"])) for entry in entries if entry["metric"] is not None]
            promoted = sum(entry.get("state") == "promoted" for entry in entries)
            best = best_of(metrics, default=None)
            yield bracket["bracket"], rung["rung"], rung["length"], len(entries), promoted, rung["outstanding"], best


@command.command()
@experiment_argument
@watch_option
@tail_option
@json_option
@on_master
def logs(master: Master, experiment: int | str, follow: bool, tail: int | None, as_json: bool) -> int:
    """Print what the trials of an experiment have printed."""
    from det_core.cli._follow import follow as follow_lines

    found = find_experiment(master, experiment)
    if follow and not as_json:
        return watch(found, tail=tail)
    if follow:
        follow_lines(found, print_line_as_json, tail=tail)
        return 0
    show = print_line_as_json if as_json else print_line
    for line in found.logs(tail=tail):
        show(line)
    return 0


@command.command(epilog=STATUSES)
@experiments_argument
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Maximum wait.")
@json_option
@on_master
def wait(master: Master, experiments: Sequence[int | str], timeout: float | None, as_json: bool) -> int:
    """Wait until experiments have ended; the exit status is the greatest of theirs."""
    start = time.monotonic()
    status = 0
    views = []
    # All are looked up before the first is waited for: a misspelt one should not be found after hours.
    for found in [find_experiment(master, name) for name in dict.fromkeys(experiments)]:
        if found.state == "PAUSED":
            note(f"experiment {found.id} is paused: it ends only after `activate`, `cancel` or `kill`")
        try:
            # One time for all together, as they run side by side.
            found.wait(timeout and max(start + timeout - time.monotonic(), 0.0))
        except TimeoutError as e:
            note(str(e))
            status = NOT_ENDED
            break
        if as_json:
            views.append(experiment_json(found, result=True))
        else:
            print_result(found)
        status = max(status, exit_status(found))
    if as_json:
        _print_views(views, experiments)
    return status


def _print_views(views: Sequence[dict[str, Any]], experiments: Sequence[object]) -> None:
    """Print as JSON the list of several experiments, or the only one; nothing if that failed."""
    if len(experiments) > 1:
        print_json(views)
    elif views:
        print_json(views[0])


def _steering(name: str, summary: str) -> None:
    """Declare one of the commands that steer experiments."""

    @command.command(name, help=summary, epilog=_STEER_EPILOG)
    @experiments_argument
    @json_option
    @on_master
    def steer(master: Master, experiments: Sequence[int | str], as_json: bool) -> int:
        from det_core.errors import MasterError, MasterUnreachable

        views = []
        status = 0
        for given in dict.fromkeys(experiments):
            try:
                found = find_experiment(master, given)
                getattr(found, name)()
            except MasterUnreachable:
                raise  # for the others it would be the same, each after its timeout
            except MasterError as e:
                error(str(e))
                status = FAILED
                continue
            views.append(experiment_json(found))
            if not as_json:
                say(f"experiment {found.id} ({found.name}): {experiment_state(found)}")
                if saving := saving_trials(found):
                    note(saving)
        if as_json:
            _print_views(views, experiments)
        return status


_steering("pause", "Have trials save and stop; `activate` resumes them.")
_steering("activate", "Resume experiments after a pause.")
_steering("cancel", "Have trials save and stop for good.")
_steering("kill", "Kill trials for good, without letting them save.")


@command.command("continue", epilog=_CONTINUE_EXAMPLES)
@experiment_argument
@click.option(
    "--config",
    metavar="KEY=VALUE",
    multiple=True,
    help="Train a single trial to another length: searcher.max_length=N.",
)
@watch_option
@json_option
@on_master
def continue_(master: Master, experiment: int | str, config: Sequence[str], follow: bool, as_json: bool) -> int:
    """Continue an experiment that has ended."""
    found = find_experiment(master, experiment).go_on(list(config))
    if follow:
        return watch(found, as_json)
    print_started(found, as_json, "continued")
    return 0


@command.command("download-checkpoint", epilog=_DOWNLOAD_EXAMPLES)
@experiment_argument
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--trial", type=TRIAL, metavar="TRIAL", shell_complete=complete_trials, help="The newest one of this trial."
)
@click.option("--checkpoint", metavar="ID", help="The one with this ID, or the beginning of one.")
@json_option
@on_master
def download_checkpoint(
    master: Master, experiment: int | str, directory: str, trial: int | None, checkpoint: str | None, as_json: bool
) -> None:
    """Download a checkpoint of an experiment into the directory DIR."""
    from det_core.cli.checkpoint import download_into

    if trial is not None and checkpoint is not None:
        raise click.UsageError("--trial and --checkpoint exclude each other: leave out one of them")
    found = find_experiment(master, experiment)
    if trial is not None:
        of_trial = (
            c for c in found.checkpoints() if c["state"] == "COMPLETED" and c["training"].get("trialId") == trial
        )
        checkpoint = next((str(c["uuid"]) for c in of_trial), None)
        if checkpoint is None:
            raise Failure(f"trial {trial} has no checkpoint in experiment {found.id}")
    with found.open_checkpoint(checkpoint) as chosen:
        download_into(chosen, directory, as_json)


@command.command()
@experiments_argument
@yes_option
@json_option
@on_master
def delete(master: Master, experiments: Sequence[int | str], yes: bool, as_json: bool) -> None:
    """Delete experiments: checkpoints, metrics, TensorBoard files and logs.

    One that has not ended, or cannot be found, stops the command before anything is deleted.
    """
    # By ID, as `latest` and its number may both be given.
    found = list({e.id: e for e in (find_experiment(master, name) for name in experiments)}.values())
    if unended := [str(e.id) for e in found if not e.ended]:
        raise Failure(f"experiment {', '.join(unended)} has not ended: cancel or kill it first. Nothing was deleted")
    question = f"delete {counted(len(found), 'experiment')}, with checkpoints, metrics, TensorBoard files and logs?"
    confirm([f"{e.id}  {e.state}  {e.name}" for e in found], question, yes)
    for e in found:
        e.delete()
        if not as_json:
            say(f"deleted experiment {e.id} ({e.name})")
    if as_json:
        print_json([e.id for e in found])
