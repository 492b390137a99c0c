"""``det-core experiment logs``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._session import find, on_master

if TYPE_CHECKING:
    from det_core.client import Master


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--follow", "-f", action="store_true", help="and what they print from now on, until it ends")
    parser.add_argument("--json", action="store_true", help="an object a line")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Print the logs of all trials."""
    experiment = find(master, args.EXPERIMENT)
    if args.follow and not args.json:
        from det_core.cli.experiment._create import watch

        return watch(args, experiment)
    from det_core.cli.experiment._lines import print_line
    from det_core.cli.experiment._tail import Tail

    tail = Tail(master, experiment)
    while True:
        for trial, line in tail.new():
            print_line(trial, line, json=args.json)
        if not args.follow or tail.over:
            return 0
        tail.pause()
