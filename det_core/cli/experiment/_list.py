"""``det-core experiment list``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._say import count, note, number, print_json, print_table, when
from det_core.cli._session import on_master

if TYPE_CHECKING:
    from det_core.client import Experiment, Master

SHOWN = 25
STATES = (
    "ACTIVE",
    "PAUSED",
    "STOPPING_CANCELED",
    "STOPPING_KILLED",
    "STOPPING_COMPLETED",
    "STOPPING_ERROR",
    "COMPLETED",
    "CANCELED",
    "ERROR",
)
"""What an experiment may be."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--name", help="only those of this name")
    parser.add_argument("--state", type=_state, metavar="STATE", help=f"only those in this state: {', '.join(STATES)}")
    parser.add_argument(
        "--limit", type=count, metavar="N", help=f"the newest N (default: {SHOWN} in a table, all in JSON; 0: all)"
    )
    parser.add_argument("--json", action="store_true", help="a list of objects")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """List the experiments."""
    from det_core.cli.experiment._told import as_json
    from det_core.client._experiment import Experiment

    limit = args.limit if args.limit is not None else 0 if args.json else SHOWN
    query = {
        "sortBy": "SORT_BY_START_TIME",
        "orderBy": "ORDER_BY_DESC",
        "name": args.name,
        "states": [args.state] if args.state else None,
    }
    told = master.get("experiments", limit=limit + 1 if limit else None, **query)
    found = [Experiment(master, one) for one in told["experiments"]]
    shown = found[:limit] if limit else found
    if args.json:
        print_json([as_json(e) for e in shown])
        return 0
    if not found:
        note(f"no experiments at {master.url}")
        return 0
    head = ("ID", "NAME", "STATE", "PROGRESS", "TRIALS", "BEST", "STARTED")
    print_table(head, [_row(e) for e in shown])
    if len(shown) < len(found):
        older = len(master.get("experiments", offset=limit, **query)["experiments"])
        note(f"{older} older: --limit 0")
    return 0


def _state(text: str) -> str:
    if text.upper() not in STATES:
        raise argparse.ArgumentTypeError(f"{text!r} is no state: there are {', '.join(STATES)}")
    return text.upper()


def _row(e: Experiment) -> tuple[str, ...]:
    from det_core.cli.experiment._told import state_of_all

    best = "-" if e.best_metric is None else f"{e.metric} {number(e.best_metric)}"
    started = when(e.info.get("start_time") or 0.0)
    return (str(e.id), e.name, state_of_all(e), f"{e.progress:.0%}", str(e.info.get("num_trials", "-")), best, started)
