"""Command line and tables of every benchmark.

A benchmark is a module with a function that measures, and yields each table when it is complete::

    def measure(args: Args) -> Tables: ...

    if __name__ == "__main__":
        program(measure, __doc__, rounds=10)
"""

import json
import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from benchmarks._turns import Figures, median

T = TypeVar("T")
Args = Namespace
OURS = "det_core"
Found = Mapping[str, Sequence[Figures]]
Pick = Callable[[Sequence[Figures], str], float]
# Read at import, because sizes are constants of modules.
QUICK = "--quick" in sys.argv[1:]
"""Whether only to show that a benchmark runs: smallest sizes, no bounds, no peers with environments of their own."""
PEERS = not QUICK and "--no-peers" not in sys.argv[1:]
"""Whether to run peers with environments of their own."""


def quick(full: T, least: T) -> T:
    """Return ``full``, or ``least`` with ``--quick``."""
    if QUICK:
        return least
    return full


def parser(doc: str | None, name: str) -> ArgumentParser:
    """Return a parser of the options of every benchmark."""
    made = ArgumentParser(prog=f"python -m {name}", description=doc, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="only show that it runs; the figures mean nothing")
    made.add_argument("--no-peers", action="store_true", help="without the peers that need an environment of their own")
    made.add_argument("--json", action="store_true", help="print a line of JSON for each row, and no tables")
    return made


def program(
    measure: Callable[[Namespace], "Tables"],
    doc: str | None,
    *,
    rounds: int | None = None,
    against: bool = False,
    folder: bool = False,
    more: Callable[[ArgumentParser], object] = lambda _: None,
) -> NoReturn:
    """Run a benchmark from the command line; the exit status is the number of missed bounds.

    Args:
        measure: Yields the tables.
        doc: Text of ``--help``.
        rounds: Default of the option ``--rounds``, the turns of each contender. None: no such option.
        against: Whether there is an option ``--against``, another commit as a contender.
        folder: Whether there is an option ``--folder``, the disk to measure on.
        more: Adds further options.
    """
    # Not by __name__, which is __main__ for a module that ``python -m`` runs.
    name = Path(sys.argv[0]).stem
    options = parser(doc, f"benchmarks.{name}")
    if rounds is not None:
        text = f"turns of each contender (default: {rounds})"
        options.add_argument("--rounds", type=int, default=quick(rounds, 1), help=text)
    if against:
        options.add_argument("--against", metavar="REV", help="measure that commit beside this tree")
    if folder:
        options.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    more(options)
    args = options.parse_args()
    # By an exception, so that what a benchmark has started is ended by its ``finally``, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    missed = 0
    for table in measure(args):
        text = str(table)
        if args.json:
            text = table.lines_of_json(name)
        print(text, flush=True)  # at once: a benchmark takes minutes, and its output is often a pipe
        missed += sum(bound.met is False for bound in table.bounds)
    if QUICK:
        missed = 0
    # The shell keeps eight bits of a status: 256 missed bounds would read as none.
    raise SystemExit(min(missed, 100))


class Bound(NamedTuple):
    """Text of a bound, and whether it is met; None where that is unknown."""

    text: str
    met: bool | None

    def __and__(self, other: "Bound") -> "Bound":
        met = self.met and other.met
        if None in (self.met, other.met):
            met = None
        return Bound(f"{self.text}, {other.text}", met)


def at_most(found: float | None, bound: float) -> Bound:
    """Return an upper bound on ``found``."""
    return Bound(f"<= {_cell(bound)}", None if found is None else found <= bound)


def at_least(found: float | None, bound: float) -> Bound:
    """Return a lower bound on ``found``."""
    return Bound(f">= {_cell(bound)}", None if found is None else found >= bound)


@dataclass
class Table:
    """Title (quantity, unit, sample size), columns, and rows with or without a bound."""

    title: str
    columns: Sequence[str]
    rows: list[list[object]] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    def row(self, what: str, *cells: object, bound: Bound | None = None) -> None:
        """Add a row: its subject, a cell for each column (None: no figure), and a bound."""
        self.rows.append([what, *cells, *[None] * (len(self.columns) - len(cells))])
        self.bounds.append(bound or Bound("", None))

    def fill(self, found: Found, bound: Callable[..., Bound], what: str = "", pick: Pick = median) -> None:
        """Add a row for each contender, with the median (or ``pick``) of its figures for each column.

        Args:
            found: Contender -> figures of each round.
            bound: Makes the bound of ours from its cells.
            what: Prefix of the contenders' names.
            pick: Combines the rounds of one figure.
        """
        for name, each in found.items():
            # A peer may lack a figure: determined's ranks never ask alone, for one.
            figures = [pick(each, column) if column in each[0] else None for column in self.columns]
            # A peer's figures are only shown: they are no reason to fail.
            of_ours = bound(*figures) if name == OURS else None
            self.row(what + name, *figures, bound=of_ours)

    def __str__(self) -> str:
        lines = [["", *self.columns, "bound", "met"]]
        for row, bound in zip(self.rows, self.bounds, strict=True):
            met = {True: "yes", False: "NO", None: "-" if bound.text else ""}[bound.met]
            lines.append([*map(_cell, row), bound.text, met])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        text = [f"\n{self.title}"]
        if QUICK:
            text[0] += " (--quick: these figures mean nothing)"
        for first, *others in lines:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            text.append("  ".join(["", first.ljust(widths[0]), *cells]).rstrip())
        return "\n".join(text)

    def lines_of_json(self, benchmark: str) -> str:
        """Return each row as a JSON object on a line."""
        head = {"benchmark": benchmark, "table": self.title, "quick": QUICK}
        rows = [dict(zip(("row", *self.columns), row, strict=True)) for row in self.rows]
        bounds = [{"bound": bound.text or None, "met": bound.met} for bound in self.bounds]
        return "\n".join(json.dumps({**head, **row, **bound}) for row, bound in zip(rows, bounds, strict=True))


Tables = Iterator[Table]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    # Before int, as a bool is one, too.
    if isinstance(value, bool):
        if value:
            return "yes"
        return "NO"
    if isinstance(value, float):
        if abs(value) >= 100:
            return f"{value:,.0f}"
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
