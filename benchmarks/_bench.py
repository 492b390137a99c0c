"""The command line and the tables of every benchmark.

A benchmark is a module with a function that measures, and yields each table when it is known::

    def measure(args: Args) -> Tables: ...

    if __name__ == "__main__":
        program(measure, __doc__, rounds=10)
"""

import json
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
QUICK = "--quick" in sys.argv[1:]
"""Whether a benchmark only shows that it runs: with the least of everything, no bound, and no peer that needs an
environment of its own. Known when a module is imported, as sizes stand in constants."""
PEERS = not QUICK and "--no-peers" not in sys.argv[1:]
"""Whether those peers run."""


def quick(full: T, least: T) -> T:
    """``full``, or with ``--quick`` ``least``."""
    return least if QUICK else full


def parser(doc: str | None, name: str) -> ArgumentParser:
    """What every benchmark understands."""
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
    """Run a benchmark as its command line says. The exit status is the number of bounds that are missed.

    ``doc`` is what ``--help`` says. ``rounds`` (turns of each contender), ``against`` (another commit as a contender)
    and ``folder`` (the disk to measure on) are options that it offers; ``more`` adds others.
    """
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
    args, missed = options.parse_args(), 0
    for table in measure(args):
        print(table.lines_of_json(name) if args.json else table, flush=True)
        missed += sum(bound.met is False for bound in table.bounds)
    raise SystemExit(0 if QUICK else min(missed, 100))


class Bound(NamedTuple):
    """A bound as a table shows it, and whether it is met; None: not known here."""

    text: str
    met: bool | None

    def __and__(self, other: "Bound") -> "Bound":
        unknown = None in (self.met, other.met)
        return Bound(f"{self.text}, {other.text}", None if unknown else self.met and other.met)


def at_most(found: float | None, bound: float) -> Bound:
    """Met where ``found`` is no more than ``bound``."""
    return Bound(f"<= {_cell(bound)}", None if found is None else found <= bound)


def at_least(found: float | None, bound: float) -> Bound:
    """Met where ``found`` is no less than ``bound``."""
    return Bound(f">= {_cell(bound)}", None if found is None else found >= bound)


@dataclass
class Table:
    """A title (what was measured, in which unit, on how many of what), columns, and rows with or without a bound."""

    title: str
    columns: Sequence[str]
    rows: list[list[object]] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    def row(self, what: str, *cells: object, bound: Bound | None = None) -> None:
        """Add a row: what it is of, a cell for each column, and a bound. None is a cell that has no figure."""
        self.rows.append([what, *cells, *[None] * (len(self.columns) - len(cells))])
        self.bounds.append(bound or Bound("", None))

    def fill(self, found: Found, bound: Callable[..., Bound], what: str = "", pick: Pick = median) -> None:
        """Add a row for each contender: for each column the median (or ``pick``) of its figure of that name.

        ``bound`` is that of ours, made from its figures; ``what`` stands before the contenders' names.
        """
        for name, each in found.items():
            figures = [pick(each, column) if column in each[0] else None for column in self.columns]
            self.row(what + name, *figures, bound=bound(*figures) if name == OURS else None)

    def __str__(self) -> str:
        lines = [["", *self.columns, "bound", "met"]]
        for row, bound in zip(self.rows, self.bounds, strict=True):
            met = {True: "yes", False: "NO", None: "-" if bound.text else ""}[bound.met]
            lines.append([*map(_cell, row), bound.text, met])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        text = [f"\n{self.title}{' (--quick: these figures mean nothing)' if QUICK else ''}"]
        for first, *others in lines:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            text.append("  ".join(["", first.ljust(widths[0]), *cells]).rstrip())
        return "\n".join(text)

    def lines_of_json(self, benchmark: str) -> str:
        """An object a row, on a line each."""
        said = {"benchmark": benchmark, "table": self.title, "quick": QUICK}
        rows = [dict(zip(("row", *self.columns), row, strict=True)) for row in self.rows]
        bounds = [{"bound": bound.text or None, "met": bound.met} for bound in self.bounds]
        return "\n".join(json.dumps({**said, **row, **bound}) for row, bound in zip(rows, bounds, strict=True))


Tables = Iterator[Table]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
