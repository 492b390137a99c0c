"""Speaking to the person at the terminal, or to the program behind the pipe."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from det_core._json import nonfinite_to_str
from det_core._notices import write_quietly


def error(message: str) -> None:
    """One line on stderr."""
    write_quietly(f"det-core: error: {message}\n", sys.stderr)


def note(message: str) -> None:
    """One line on stderr that is no error."""
    write_quietly(f"det-core: {message}\n", sys.stderr)


@contextmanager
def noted_if_slow(message: str, after: float = 1.0) -> Iterator[None]:
    """Note what is being done if the block takes longer than that many seconds."""
    timer = threading.Timer(after, note, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Have what the library warns of while the block runs told as :func:`note` tells things."""
    handler = _Notes(logging.WARNING)
    logger = logging.getLogger("det_core")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"warning: {' '.join(record.getMessage().split())}")


def print_json(value: Any) -> None:
    """A value on stdout for a program; numbers that are not finite as the strings NaN, Infinity, -Infinity."""
    print(json.dumps(nonfinite_to_str(value), indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under their heads: boxed and coloured by rich on a terminal, aligned plain text elsewhere."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(_escaped(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    for line in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def when(seconds: float) -> str:
    """A moment in local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def age(seconds: float | None) -> str:
    """How long ago a moment was, short."""
    if seconds is None or seconds == float("inf"):
        return "-"
    ago = max(time.time() - seconds, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if ago >= 2 * length or (unit == "min" and ago >= length):
            return f"{ago / length:.0f} {unit}"
    return f"{ago:.0f} s"


def size(count: int) -> str:
    """A number of bytes, short."""
    units = ["B", "kB", "MB", "GB", "TB"]
    value = float(count)
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


def count(text: str) -> int:
    """The type of an option that is a number of things."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def number(value: Any) -> str:
    """A metric's value, short enough to read."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(nonfinite_to_str(value), ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _escaped(cell: str) -> Any:
    from rich.text import Text

    return Text(cell)
