"""``det-core master down``."""

from __future__ import annotations

import argparse
from pathlib import Path

from det_core.cli._say import error, note, print_json
from det_core.cli._status import FAILED
from det_core.cli.master._orphans import tell_living_trials

PATIENCE = 2.0
"""Seconds that an answer may take."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Stop the master, if there is one."""
    from det_core.client._embedded import stop_master
    from det_core.client._find import home_of

    home = home_of(args.home)
    if args.home is None and (elsewhere := _elsewhere(home)):
        error(
            f"DET_MASTER is {elsewhere}, and that master is stopped where it was started. "
            f"To stop the one of {home}: det-core master down --home {home}"
        )
        return FAILED
    busy = _busy(home)
    stopped = stop_master(home)
    if args.json:
        print_json({"stopped": stopped, "home": str(home)})
    elif stopped:
        print(f"the master of {home} has ended")
        if busy:
            note("trials that run go on; the next master finds them")
    else:
        note(f"no master runs for {home}")
        tell_living_trials(home)
    return 0


def _elsewhere(home: Path) -> str | None:
    """The address in DET_MASTER, unless it is that of the home folder's own master."""
    from det_core._env import Environment
    from det_core.client._address import canonical, running

    named = Environment.read().master
    own = running(home / "master")
    return None if own is not None and named and canonical(str(own["url"])) == canonical(named) else named


def _busy(home: Path) -> bool:
    """Whether trials run, as far as the master says so."""
    from det_core.client._address import locate
    from det_core.client._master import Master
    from det_core.errors import MasterError

    address = locate(home=home)
    if address is None:
        return False
    try:
        with Master(address, timeout=0, idle_timeout=PATIENCE) as master:
            return bool(master.get("master").get("slotsInUse"))
    except MasterError:
        return True
