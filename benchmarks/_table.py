"""One way to print a result, for every benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks._program import QUICK


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print ``rows`` under ``columns``, the first column flush left and the others flush right.

    Args:
        title: what was measured, in which unit, on how many of what.
        columns: the heads.
        rows: cells; floats are printed with three significant digits, None as ``-``, and bools as yes or NO
            (so that a bound that is not met stands out).
    """
    lines = [[str(c) for c in columns], *([_cell(c) for c in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(f"\n{title}{' (--quick: these figures mean nothing)' if QUICK else ''}")
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        print("  " + "  ".join(cells).rstrip(), flush=True)
        if number == 0:
            print("  " + "  ".join("-" * w for w in widths))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
