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
    _warn_of_newest(checkpoints, going)
    if not args.yes:
        if not sys.stdin.isatty():
            error("not deleting without being asked: add --yes where there is no terminal")
            return 2
        if not _agreed(going):
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


def _warn_of_newest(checkpoints: Checkpoints, going: list[Checkpoint]) -> None:
    """Say what runs, live trials among them, will start from without the newest of their checkpoints."""
    ids = {c.storage_id for c in going}
    for run_id in dict.fromkeys(c.run_id for c in going if c.run_id is not None):
        of_run = list(checkpoints.of_run(run_id))
        if not of_run or of_run[-1].storage_id not in ids:
            continue
        left = [c for c in of_run if c.storage_id not in ids]
        start = f"from {left[-1].storage_id}, steps {left[-1].steps_completed}" if left else "without a checkpoint"
        note(f"warning: {of_run[-1].storage_id} is the newest of its run {run_id}: its next start will be {start}")


def _agreed(going: list[Checkpoint]) -> bool:
    for c in going:
        print(f"{c.storage_id}  run {c.run_id or '-'}  steps {c.steps_completed}  age {age(c.time)}")
    what = "this checkpoint" if len(going) == 1 else f"these {len(going)} checkpoints"
    return input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")
