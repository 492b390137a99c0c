"""``det-core runs export``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from det_core._standalone.files import replacing
from det_core.cli._say import note

if TYPE_CHECKING:
    from det_core.client import Run
    from det_core.journal import Row

T = TypeVar("T")
LONG = 20_000
"""Rows from which on a terminal is shown a progress bar."""
_EXAMPLES = """\
examples:
  det-core runs export latest --format csv > metrics.csv
  det-core runs export latest --format jsonl --group validation | jq .metrics.accuracy
  det-core runs export latest --format parquet --batches --output metrics.parquet

Each step occurs once: rows that were reported again after a resume are left out unless --superseded asks for
them. csv and parquet have a column for each metric (nested ones with dots in their names); with --batches
each batch is a line of its own, numbered in the column `batch`. jsonl keeps each row as it was reported,
numbers that are not finite as strings, with their paths in `nonfinite`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EXAMPLES
    parser.add_argument("--format", "-f", required=True, choices=("csv", "jsonl", "parquet"), help="what to write")
    parser.add_argument("--group", "-g", help="one metric group (default: all)")
    parser.add_argument("--output", "-o", metavar="FILE", help="where to (default: stdout)")
    parser.add_argument("--batches", action="store_true", help="also the batch metrics")
    parser.add_argument("--superseded", action="store_true", help="also rows reported again after a resume")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Export a run."""
    from det_core import client
    from det_core.cli.runs import _formats

    found = client.run(args.RUN, args.home)
    if args.group is not None and args.group not in found.groups():
        raise ValueError(
            f"run {found.run_id} has no group {args.group!r}; it has: {', '.join(found.groups()) or 'none'}"
        )
    if args.format == "parquet" and args.output is None and sys.stdout.isatty():
        raise ValueError("parquet is not for a terminal: name a file with --output")
    table = Table(found, args.group, args.superseded, args.batches)
    with _target(args.output) as out:
        getattr(_formats, f"write_{args.format}")(table, out)
    for key, where in sorted(table.conflicts.items()):
        step = min(where, key=lambda place: (place[1], place[0] or 0))[0]
        count = f"{len(where)} step(s), first {step}"
        note(f"ranks reported different values of {key} for {count}; the lowest rank's is kept")
    return 0


class Table:
    """The rows to export, as often as they are asked for."""

    def __init__(self, run: Run, group: str | None, superseded: bool, batches: bool) -> None:
        self._run, self._group = run, group
        self.superseded, self.batches = superseded, batches
        self.conflicts: dict[str, set[tuple[int | None, int]]] = {}
        """Metrics to which several ranks gave different values, with the steps and restarts where they did."""

    def rows(self, doing: str) -> Iterator[Row]:
        """The rows; on a terminal, if there are many, behind a progress bar."""
        groups = self._run.groups() if self._group is None else [self._group]
        total = sum(self._run.record.count(group) for group in groups)
        rows = self._run.rows(self._group, superseded=self.superseded, batches=self.batches)
        for row in _with_progress(rows, total, doing):
            for key in row.conflicts:
                self.conflicts.setdefault(f"{row.group}.{key}", set()).add((row.steps_completed, row.restart))
            yield row

    def flat(self, doing: str) -> Iterator[dict[str, Any]]:
        """The rows as columns, and each batch as a row."""
        from det_core.client._table import flat, flat_batches

        for row in self.rows(doing):
            yield flat(row, superseded=self.superseded, batches=self.batches)
            if self.batches:
                yield from flat_batches(row, superseded=self.superseded)


def _with_progress(rows: Iterable[T], total: int, doing: str) -> Iterable[T]:
    if total < LONG or not sys.stderr.isatty():
        return rows
    from rich.console import Console
    from rich.progress import track

    return track(rows, description=doing, total=total, console=Console(stderr=True), transient=True)


@contextmanager
def _target(output: str | None) -> Iterator[IO[bytes]]:
    """Stdout, or a file that appears when it is whole."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else f"no folder {path.parent}"))
    with replacing(path, durable=False) as staging, open(staging, "wb") as out:
        yield out
