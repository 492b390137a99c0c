"""``det-core runs list``."""

from __future__ import annotations

import argparse
import sys

from det_core.cli._say import count, note, print_json, print_table, when

SHOWN = 25


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--name", help="only runs of this name (or whose script has this file name)")
    parser.add_argument(
        "--limit", type=count, metavar="N", help=f"the newest N (default: {SHOWN} in a table, all in JSON; 0: all)"
    )
    parser.add_argument("--json", action="store_true", help="a list of objects")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """List the runs."""
    from det_core import client

    runs = [r for r in client.runs(args.home) if args.name is None or args.name in (r.name, _file(r.name))]
    limit = args.limit if args.limit is not None else 0 if args.json else SHOWN
    shown = runs[:limit] if limit else runs
    if args.json:
        print_json([_as_json(r) for r in shown])
        return 0
    if not runs:
        from det_core._env import Environment

        note(f"no runs in {args.home or Environment.read().home}")
        return 0
    rows = [(r.run_id, r.state, when(r.created), str(r.restarts), r.name) for r in shown]
    print_table(("RUN", "STATE", "STARTED", "RESUMED", "NAME"), rows)
    if len(shown) < len(runs) and sys.stderr.isatty():
        note(f"{len(runs) - len(shown)} older runs are not shown; --limit 0 shows all")
    return 0


def _as_json(run: object) -> dict[str, object]:
    from det_core.client import Run

    assert isinstance(run, Run)
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "created": run.created,
        "restarts": run.restarts,
        "path": str(run.path),
    }


def _file(name: str) -> str:
    return name.rsplit("/", 1)[-1]
