"""``det-core trial kill``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._say import print_json
from det_core.cli._session import on_master
from det_core.cli.trial._found import find

if TYPE_CHECKING:
    from det_core.client import Master


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Kill one trial."""
    from det_core.cli.experiment._told import trial_json

    trial = find(master, args.TRIAL)
    trial.kill()
    if args.json:
        print_json(trial_json(trial))
    else:
        print(f"trial {trial.id}: {trial.state}")
    return 0
