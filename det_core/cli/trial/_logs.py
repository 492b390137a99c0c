"""``det-core trial logs``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._session import on_master
from det_core.cli.trial._found import find

if TYPE_CHECKING:
    from det_core.client import Master


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--follow", "-f", action="store_true", help="and what it prints from now on, until it ends")
    parser.add_argument("--json", action="store_true", help="an object a line")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Print the log of one trial."""
    from det_core.cli.experiment._lines import print_line

    trial = find(master, args.TRIAL)
    for line in trial.logs(follow=args.follow):
        print_line(trial, line, json=args.json, head=False)
    return 0
