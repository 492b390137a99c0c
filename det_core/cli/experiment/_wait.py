"""``det-core experiment wait``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._say import note, print_json
from det_core.cli._session import find, on_master
from det_core.cli._status import MEANINGS, NOT_ENDED, of_state

if TYPE_CHECKING:
    from det_core.client import Master


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = MEANINGS
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="wait no longer than that")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Wait for an experiment; the exit status says how it ended."""
    from det_core.cli.experiment._told import as_json, print_result, still_saves

    experiment = find(master, args.EXPERIMENT)
    if saving := still_saves(experiment):
        note(f"experiment {experiment.id} is to {'pause' if experiment.state == 'PAUSED' else 'end'}: {saving}")
    if experiment.state == "PAUSED":
        note(f"experiment {experiment.id} is paused: it ends only after `activate`, `cancel` or `kill`")
    try:
        experiment.wait(args.timeout)
    except TimeoutError as e:
        note(str(e))
        return NOT_ENDED
    if args.json:
        print_json(as_json(experiment, result=True))
    else:
        print_result(args, experiment)
    return of_state(experiment.state)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value
