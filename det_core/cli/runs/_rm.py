"""``det-core runs rm``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from det_core.cli._say import error, note

if TYPE_CHECKING:
    from det_core.client import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("RUN", nargs="+", help="a run's id, the beginning of one, or `latest`")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument(
        "--folder-only", action="store_true", help="leave checkpoints and TensorBoard files in other storages"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Delete runs; one that is being written, or cannot be found, stops it before anything is deleted."""
    from det_core import client
    from det_core.errors import RunLocked

    runs = list({r.run_id: r for r in (client.run(name, args.home) for name in args.RUN)}.values())
    if live := [r.run_id for r in runs if r.state == "running"]:
        raise RunLocked(f"{', '.join(live)}: still running; stop it first. Nothing was deleted")
    if not args.yes:
        if not sys.stdin.isatty():
            error("not deleting without being asked: add --yes where there is no terminal")
            return 2
        if not _agreed(runs, args.folder_only):
            note("nothing was deleted")
            return 1
    for r in runs:
        storages = r.storages  # read before its record is gone
        print(f"deleted {client.delete_run(r.run_id, args.home, folder_only=args.folder_only)}")
        for storage in storages:
            if args.folder_only:
                seen = f"det-core checkpoint list --storage {shlex.quote(_text(storage))} --run {r.run_id}"
                note(f"its checkpoints and TensorBoard files stay in {_text(storage)}; to see them: {seen}")
            else:
                print(f"deleted its checkpoints and TensorBoard files in {_text(storage)}")
    return 0


def _agreed(runs: list[Run], folder_only: bool) -> bool:
    from det_core.cli._say import when

    for r in runs:
        print(f"{r.run_id}  {r.state}  {when(r.created)}  {r.name}")
    what = "this run" if len(runs) == 1 else f"these {len(runs)} runs"
    storages = sorted({_text(storage) for r in runs for storage in r.storages})
    if folder_only:
        what += ", with all that is in its folder"
    else:
        what += ", with metrics, checkpoints and TensorBoard files"
        what += f", also those in {' and '.join(storages)}" if storages else ""
    return input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")


def _text(storage: Any) -> str:
    """A storage as ``--storage`` takes it."""
    return storage if isinstance(storage, str) else json.dumps(storage)
