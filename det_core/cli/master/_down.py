"""``det-core master down``."""

from __future__ import annotations

import argparse

from det_core.cli._say import note, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Stop the master, if there is one."""
    from det_core.client._embedded import stop_master
    from det_core.client._find import home_of

    home = home_of(args.home)
    stopped = stop_master(home)
    if args.json:
        print_json({"stopped": stopped, "home": str(home)})
    elif stopped:
        print(f"the master of {home} has ended")
        note("trials that run go on; the next master finds them")
    else:
        note(f"no master runs for {home}")
    return 0
