"""``det-core trial metrics``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from det_core.cli._say import error, note, number, print_json, print_table
from det_core.cli._session import on_master
from det_core.cli._status import FAILED
from det_core.cli.trial._found import find

if TYPE_CHECKING:
    from det_core.client import Master


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--group", "-g", help="one metric group, as training or validation (default: all)")
    parser.add_argument("--csv", action="store_true", help="a line for each step, every digit of each number")
    parser.add_argument("--json", action="store_true", help="a list of objects")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Print the metrics of one trial."""
    from det_core.client._table import spread
    from det_core.client._trial import metric_rows

    trial = find(master, args.TRIAL)
    rows = list(metric_rows(master, [trial.id], args.group))
    if args.group and not rows and (groups := {row["group"] for row in metric_rows(master, [trial.id], None)}):
        error(f"trial {trial.id} has reported no group {args.group!r}: there are {', '.join(sorted(groups))}")
        return FAILED
    if args.json:
        print_json(rows)
        return 0
    if not rows:
        note(f"trial {trial.id} has reported no metrics" + (f" in the group {args.group!r}" if args.group else ""))
        return 0
    values = [spread(row["metrics"]) for row in rows]
    names = list(dict.fromkeys(name for row in values for name in row))
    table = [
        [row["group"], row["steps_completed"], *(found.get(name) for name in names)]
        for row, found in zip(rows, values, strict=True)
    ]
    head = ["group", "steps_completed", *names]
    if args.csv:
        _write_csv(head, table)
    else:
        print_table(
            [name.upper() if name in head[:2] else name for name in head],
            [["-" if cell is None else number(cell) for cell in row] for row in table],
        )
    return 0


def _write_csv(head: list[str], table: list[list[Any]]) -> None:
    import csv

    from det_core.cli.runs._formats import cell

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([[cell(value) for value in row] for row in table])
