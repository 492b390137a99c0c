"""``det-core experiment continue``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._say import note, print_json
from det_core.cli._session import command_for, find, on_master
from det_core.cli.experiment._create import watch

if TYPE_CHECKING:
    from det_core.client import Master

_EXAMPLES = """\
examples:
  det-core experiment continue 3                                     after an error that was outside of it
  det-core experiment continue 3 --follow
  det-core experiment continue 3 --config searcher.max_length=100    a single trial, trained longer

Trials that are incomplete resume from their latest checkpoints."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--config",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="train a single trial to another length: searcher.max_length=N",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="watch it until it ends, and print the best trial")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Continue an experiment."""
    from det_core.cli.experiment._told import as_json

    experiment = find(master, args.EXPERIMENT).go_on(args.config)
    if args.follow:
        return watch(args, experiment)
    if args.json:
        print_json(as_json(experiment))
    else:
        print(f"experiment {experiment.id} ({experiment.name}): {experiment.state}")
        note(f"to watch it: {command_for(args, 'experiment', 'logs', experiment.id, '-f')}")
    return 0
