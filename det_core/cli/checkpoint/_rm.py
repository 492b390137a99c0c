"""``det-core checkpoint rm``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from det_core.cli._bar import bar
from det_core.cli._say import age, error, note, print_json
from det_core.cli.checkpoint._found import named, on_found

if TYPE_CHECKING:
    from det_core.client import Checkpoint, Checkpoints


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.set_defaults(run_command=on_found(run))


def run(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    """Delete checkpoints; one that is in use, or cannot be found, stops it before anything is deleted."""
    from det_core.errors import CheckpointError

    going = named(checkpoints, args.ID)
    if used := checkpoints.in_use.intersection(c.storage_id for c in going):
        raise CheckpointError(f"{', '.join(sorted(used))}: a process is reading it. Nothing was deleted")
    if not args.yes:
        if not sys.stdin.isatty():
            error("not deleting without being asked: add --yes where there is no terminal")
            return 2
        if not _agreed(checkpoints, going):
            note("nothing was deleted")
            return 1
    with bar("deleting", len(going), bytes=False) as advance:
        for checkpoint in going:
            checkpoint.delete()
            advance(1)
            if not args.json:
                print(f"deleted {checkpoint.storage_id}")
    if args.json:
        print_json([c.storage_id for c in going])
    return 0


def _agreed(checkpoints: Checkpoints, going: list[Checkpoint]) -> bool:
    newest = {c.run_id: c.storage_id for c in checkpoints}
    for c in going:
        told = "" if newest.get(c.run_id) != c.storage_id else "  the newest of its run: it resumes from this one"
        print(f"{c.storage_id}  run {c.run_id or '-'}  steps {c.steps_completed}  age {age(c.time)}{told}")
    what = "this checkpoint" if len(going) == 1 else f"these {len(going)} checkpoints"
    return input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")
