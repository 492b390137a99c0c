"""Progress bars, for a person who watches: on stderr, and only if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(doing: str, total: int, *, bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar that what is given advances; gone when the block ends.

    Args:
        doing: what stands before it.
        total: what it is full at.
        bytes: whether it counts bytes, and so has a speed; else it counts things.
    """
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if bytes else [MofNCompleteColumn()]
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(doing, total=total)
        yield lambda done: shown.advance(task, done)
