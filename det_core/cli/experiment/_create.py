"""``det-core experiment create``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from det_core.cli._config_file import is_there, tell_mistakes
from det_core.cli._say import count, note, noted_if_slow, print_json
from det_core.cli._session import command_for, on_master
from det_core.cli._status import NOT_UNDERSTOOD

if TYPE_CHECKING:
    from det_core.client import Experiment, Master

SLOW = 3.0
"""Seconds that an experiment may take to be created without a word."""
_EXAMPLES = """\
examples:
  det-core experiment create search.yaml .
  det-core experiment create search.yaml . --follow
  det-core experiment create search.yaml . --config hyperparameters.lr=0.01 --config searcher.max_trials=8
  ID=$(det-core experiment create search.yaml . --json | jq .id)

Each trial runs in a copy of DIR as it is now, but for what DIR/.detignore names (patterns as in .gitignore), .git and
virtual environments. Without DIR it runs in an empty folder."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("CONFIG", help="the experiment's configuration, a YAML or JSON file")
    parser.add_argument("DIR", nargs="?", help="the folder with what the trials run")
    parser.add_argument("--follow", "-f", action="store_true", help="watch it until it ends, and print the best trial")
    parser.add_argument(
        "--config", metavar="KEY=VALUE", action="append", default=[], help="change a value, as searcher.max_trials=8"
    )
    parser.add_argument(
        "--slots", type=count, metavar="N", help="slots (GPUs) of each trial: resources.slots_per_trial"
    )
    parser.add_argument("--paused", action="store_true", help="create it only; `activate` starts it")
    parser.add_argument("--check", action="store_true", help="only look whether it could be created")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Create an experiment. What is wrong with the command line is told before a master is started."""
    if not is_there(args.CONFIG) or (args.DIR is not None and not is_there(args.DIR, folder=True)):
        return NOT_UNDERSTOOD
    return on_master(_create)(args)


def submit(args: argparse.Namespace, master: Master, config: object, overrides: list[str]) -> Experiment | None:
    """Create an experiment from ``config`` and ``args.DIR``; None: it has mistakes, which were told."""
    from det_core._env import Environment
    from det_core.client._create import create
    from det_core.errors import ExperimentInvalid

    home = Path(args.home).absolute() if args.home else Environment.read().home
    try:
        what = "sending it" if args.DIR is None else f"packing the files of {args.DIR} and sending them"
        with noted_if_slow(f"{what} to the master …", after=SLOW):
            experiment, warnings = create(
                master,
                config,  # type: ignore[arg-type]
                args.DIR,
                overrides=overrides,
                activate=not args.paused,
                validate_only=args.check,
                home=home,
            )
    except ExperimentInvalid as e:
        tell_mistakes(e.problems, config)
        return None
    for warning in warnings:
        note(f"warning: {warning}")
    return experiment


def _create(args: argparse.Namespace, master: Master) -> int:
    slots = [] if args.slots is None else [f"resources.slots_per_trial={args.slots}"]
    experiment = submit(args, master, args.CONFIG, [*args.config, *slots])
    if experiment is None:
        return NOT_UNDERSTOOD
    if args.check:
        if args.json:
            print_json({"config": experiment.config})
        else:
            print(f"{args.CONFIG}: this can be run")
        return 0
    if not args.follow or args.paused:
        if args.json:
            from det_core.cli.experiment._told import as_json

            print_json(as_json(experiment))
        else:
            print(f"created experiment {experiment.id} ({experiment.name})")
            note(f"to watch it: {command_for(args, 'experiment', 'logs', experiment.id, '-f')}")
        return 0
    return watch(args, experiment)


def watch(args: argparse.Namespace, experiment: Experiment) -> int:
    """Follow an experiment to its end and tell its result; the exit status says how it ended."""
    from det_core.cli.experiment._follow import follow
    from det_core.cli.experiment._told import as_json, outcome, print_result

    follow(args, experiment, quiet=args.json)
    if args.json:
        print_json(as_json(experiment, result=True))
    else:
        print_result(args, experiment)
    return outcome(experiment)
