"""``det-core checkpoint list``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from det_core.cli._say import age, count, note, print_json, print_table, size
from det_core.cli.checkpoint._found import DAMAGED, as_json, on_found, states

if TYPE_CHECKING:
    from det_core.client import Checkpoint, Checkpoints

SHOWN = 25


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--limit", type=count, metavar="N", help=f"the newest N (default: {SHOWN} in a table, all in JSON; 0: all)"
    )
    parser.set_defaults(run_command=on_found(run))


def run(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    """List the checkpoints."""
    every = list(checkpoints)[::-1]
    limit = args.limit if args.limit is not None else 0 if args.json else SHOWN
    shown = every[:limit] if limit else every
    state = states(checkpoints, shown)
    shown = [c for c in shown if c.storage_id in state]
    if args.json:
        print_json([as_json(c, state[c.storage_id]) for c in shown])
        return 0
    if not every:
        of = f"of run {checkpoints.run_id} " if checkpoints.run_id else ""
        root = checkpoints.root
        wrong = args.storage is not None and os.path.isabs(root) and not os.path.exists(root)
        missing = ": there is no such folder" if wrong else ""
        note(f"no checkpoints {of}in {root}{missing}")
        return 0
    with_run = checkpoints.run_id is None
    head = ("CHECKPOINT", *(("RUN",) if with_run else ()), "STEPS", "SIZE", "FILES", "AGE", "STATE")
    print_table(head, [_row(c, state[c.storage_id], with_run) for c in shown])
    if limit and limit < len(every) and sys.stderr.isatty():
        note(f"{len(every) - limit} older checkpoints are not shown; --limit 0 shows all")
    return 0


def _row(c: Checkpoint, state: str, with_run: bool) -> tuple[str, ...]:
    content: tuple[Any, Any] = ("-", "-") if state == DAMAGED else (size(c.size), c.files)
    run = (c.run_id or "-",) if with_run else ()
    return (c.storage_id, *run, str(c.steps_completed), content[0], str(content[1]), age(c.time), state)
