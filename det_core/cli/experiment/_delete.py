"""``det-core experiment delete``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from det_core.cli._say import error, note, print_json
from det_core.cli._session import experiment_id, find, on_master
from det_core.cli._status import FAILED, NOT_UNDERSTOOD

if TYPE_CHECKING:
    from det_core.client import Master


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "EXPERIMENT", nargs="+", type=experiment_id, help="numbers of experiments that have ended, or `latest`"
    )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="the numbers of those that were deleted, as a list")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Delete experiments; one that has not ended, or is not there, stops it before anything is deleted."""
    from det_core.errors import UnknownToMaster

    try:
        found = list({e.id: e for e in (find(master, given) for given in args.EXPERIMENT)}.values())
    except UnknownToMaster as unknown:
        error(f"{unknown}. Nothing was deleted")
        return FAILED
    if going := [str(e.id) for e in found if not e.ended]:
        error(f"experiment {', '.join(going)} has not ended: cancel or kill it first. Nothing was deleted")
        return FAILED
    if not args.yes:
        if not sys.stdin.isatty():
            error("nothing was deleted: add --yes where there is no terminal to ask at")
            return NOT_UNDERSTOOD
        for e in found:
            print(f"{e.id}  {e.state}  {e.name}")
        what = "this experiment" if len(found) == 1 else f"these {len(found)} experiments"
        if input(
            f"delete {what}, with checkpoints, metrics, TensorBoard files and logs? [y/N] "
        ).strip().lower() not in ("y", "yes"):
            note("nothing was deleted")
            return FAILED
    for e in found:
        e.delete()
        if not args.json:
            print(f"deleted experiment {e.id} ({e.name})")
    if args.json:
        print_json([e.id for e in found])
    return 0
