"""``det-core experiment wait``."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from det_core.cli._say import note, print_json
from det_core.cli._session import find, on_master
from det_core.cli._status import MEANINGS, NOT_ENDED

if TYPE_CHECKING:
    from det_core.client import Master


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = MEANINGS
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="wait no longer than that")
    parser.add_argument("--json", action="store_true", help="one object; a list of them, if several are named")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Wait for experiments; the exit status says how they ended: of several, the greatest one."""
    from det_core.cli.experiment._told import as_json, outcome, print_result, still_saves

    until = None if args.timeout is None else time.monotonic() + args.timeout
    status, told = 0, []
    for experiment in [find(master, given) for given in dict.fromkeys(args.EXPERIMENT)]:
        if saving := still_saves(experiment):
            note(f"experiment {experiment.id} is to {'pause' if experiment.state == 'PAUSED' else 'end'}: {saving}")
        if experiment.state == "PAUSED":
            note(f"experiment {experiment.id} is paused: it ends only after `activate`, `cancel` or `kill`")
        try:
            experiment.wait(None if until is None else max(until - time.monotonic(), 0.0))
        except TimeoutError:
            note(f"experiment {experiment.id} is still {experiment.state} after {args.timeout:g} s")
            return NOT_ENDED
        if args.json:
            told.append(as_json(experiment, result=True))
        else:
            print_result(args, experiment)
        status = max(status, outcome(experiment))
    if args.json:
        print_json(told[0] if len(args.EXPERIMENT) == 1 else told)
    return status


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value
