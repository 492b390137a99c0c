"""Output for the person at the terminal, or for the program behind the pipe; exit statuses."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from det_core._notices import write_quietly

DONE = 0
FAILED = 1
INVALID = 2
ENDED_IN_ERROR = 3
CANCELED = 4
NOT_ENDED = 5
INTERRUPTED = 130  # as a shell tells of SIGINT: 128 and its number
MAX_VALUE_LENGTH = 60
"""Characters of a value in a table or a list of facts."""

STATUSES = """\
exit status:
  0  done; with --follow and `wait`: the experiment is COMPLETED
  1  failed: one line on stderr says why
  2  the command line is invalid, or the configuration has mistakes
  3  the experiment ended in ERROR
  4  the experiment was canceled or killed
  5  `wait --timeout`: the experiment has not ended by then
  130  interrupted by Ctrl-C or SIGTERM; experiments go on"""


class Failure(click.ClickException):
    """The end of a command: one line on stderr, and the exit status."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = status  # type: ignore[misc]  # click reads it from the instance


def printable(text: object) -> str:
    """Return text with its control characters escaped: a name may hold some that rewrite the terminal."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def say(message: str) -> None:
    """Print one line of the result."""
    print(printable(message))


def error(message: str) -> None:
    """Print an error as one line on stderr."""
    write_quietly(f"det-core: error: {printable(message)}\n", sys.stderr)


def note(message: str) -> None:
    """Print one line on stderr that is not an error."""
    write_quietly(f"det-core: {printable(message)}\n", sys.stderr)


@contextmanager
def note_if_slow(message: str, delay: float = 1.0) -> Iterator[None]:
    """Print a note if the block takes longer than ``delay`` seconds."""
    timer = threading.Timer(delay, note, [message])
    timer.daemon = True  # an error in the block must not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings of the library as notes while the block runs."""
    import logging  # here, as json below: `det-core --help` needs neither

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(f"warning: {' '.join(record.getMessage().split())}")

    handler = Notes(logging.WARNING)
    logger = logging.getLogger("det_core")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C while the block runs."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    # Only the main thread may set handlers; tests call commands from others.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def confirm(items: Iterable[str], question: str, yes: bool) -> None:
    """Ask before something is deleted.

    Args:
        items: lines that describe what will be deleted.
        question: question to ask.
        yes: whether --yes was given, which answers it.

    Raises:
        Failure: If the answer is not yes, or nobody can answer.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure("refusing to delete without confirmation: pass --yes where nobody can answer", INVALID)
    for item in items:
        say(item)
    # Not click.confirm(), which asks again until it understands the answer.
    print(f"{printable(question)} [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was deleted")
        raise click.exceptions.Exit(FAILED)


def print_json(value: Any) -> None:
    """Print a value for a program; numbers that are not finite as the strings NaN, Infinity, -Infinity."""
    print(_dump(value, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their heads: by rich on a terminal, as aligned plain text elsewhere."""
    lines = [[printable(_cell(value)) for value in row] for row in rows]
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")  # an ID that is cut cannot be copied
        for line in lines:
            table.add_row(*map(Text, line))  # as Text, in which brackets are not markup
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    for line in [list(columns), *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: object) -> object:
    """Return a value as a table shows it: None as a dash, numbers and values of JSON shortened."""
    if value is None:
        return "-"
    if isinstance(value, float | bool | list | dict):
        return number(value)
    return value


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names with their values; those that are None are left out. Values may have several lines."""
    shown = [(f"{name}:", value) for name, value in facts if value is not None]
    width = max([12, *(len(name) for name, _ in shown)])
    for name, value in shown:
        lines = "\n".join(map(printable, str(value).split("\n")))
        print(f"{printable(name):<{width}} {lines}")


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str, hidden: int = 0) -> None:
    """Print a list of things as a table, and as notes that there are none, or how many older ones are left out."""
    if table := list(rows):
        print_table(columns, table)
    else:
        note(empty)
    if hidden > 0:
        note(f"{hidden} older: --limit 0")


@contextmanager
def progress_bar(title: str, total: int, *, unit: str = "bytes", least: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal, until the block ends.

    Args:
        title: text before the bar.
        total: amount at which it is full.
        unit: "bytes", which have a speed, or anything else.
        least: total below which no bar is shown.

    Yields:
        A function that advances it.
    """
    if total < least or not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich import progress
    from rich.console import Console

    counts: list[progress.ProgressColumn] = [progress.MofNCompleteColumn()]
    if unit == "bytes":
        counts = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    text = progress.TextColumn("{task.description}", markup=False)
    columns = [text, progress.BarColumn(), *counts, progress.TimeRemainingColumn()]
    # On stderr, so that stdout can be a pipe while a person watches.
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda done: shown.advance(task, done)


def when(seconds: float | None) -> str:
    """Return a moment in local time, to the second."""
    if not seconds or seconds == float("inf"):
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration(seconds: float) -> str:
    """Return a length of time, rounded."""
    whole = int(max(seconds, 0.0))
    hours = whole // 3600
    minutes = whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return f"{max(seconds, 0.0):.1f} s"


def size(count: int | None) -> str | None:
    """Return a number of bytes, rounded."""
    if count is None:
        return None
    units = ["B", "kB", "MB", "GB", "TB"]
    value = float(count)
    while value >= 999.5 and len(units) > 1:  # which three digits would show as 1e+03
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


def number(value: Any) -> str:
    """Return a value, short enough to read."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else _dump(value)
    if len(text) > MAX_VALUE_LENGTH:
        return text[: MAX_VALUE_LENGTH - 1] + "…"
    return text


def _dump(value: Any, indent: int | None = None) -> str:
    import json

    from det_core._json import nonfinite_to_str

    return json.dumps(nonfinite_to_str(value), indent=indent, ensure_ascii=False)


def counted(count: int, noun: str) -> str:
    """Return "1 run" or "3 runs"."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
