"""``det-core runs rm``."""

from __future__ import annotations

import argparse
import sys

from det_core.cli._say import error, note


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("RUN", nargs="+", help="a run's id, the beginning of one, or `latest`")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Delete runs; one that is being written, or cannot be found, stops it before anything is deleted."""
    from det_core import client
    from det_core.cli._say import when
    from det_core.errors import RunLocked

    runs = {r.run_id: r for r in (client.run(name, args.home) for name in args.RUN)}
    if live := [r.run_id for r in runs.values() if r.state == "running"]:
        raise RunLocked(f"{', '.join(live)}: still running; stop it first. Nothing was deleted")
    if not args.yes:
        if not sys.stdin.isatty():
            error("not deleting without being asked: add --yes where there is no terminal")
            return 2
        for r in runs.values():
            print(f"{r.run_id}  {r.state}  {when(r.created)}  {r.name}")
        what = "this run" if len(runs) == 1 else f"these {len(runs)} runs"
        if input(f"delete {what}, with metrics and checkpoints in its folder? [y/N] ").strip().lower() not in (
            "y",
            "yes",
        ):
            note("nothing was deleted")
            return 1
    for run_id, r in runs.items():
        storage = r.storage
        print(f"deleted {client.delete_run(run_id, args.home)}")
        if storage is not None:
            note(f"its checkpoints stay in {storage}: det-core checkpoint list --storage … --run {run_id}")
    return 0
