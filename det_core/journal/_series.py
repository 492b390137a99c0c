"""The rows of one group as one series: in order, merged over ranks, superseded rows told apart."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core.journal._line import decode
from det_core.journal._read import NO_STEP, Places
from det_core.journal._seen import same
from det_core.journal._supersede import Supersession

if TYPE_CHECKING:
    from det_core.journal._record import Row


Found = tuple[list[int], bool]
"""The places of what is one row of a series, and whether it is superseded."""


def series(places: Places, group: str, rules: Supersession, *, superseded: bool) -> Iterator[Found]:
    """Yield the rows of a group by restart and step, without reading them.

    Those without a step come last in their restart.
    """
    again = _reported_late(places, rules, group)
    restarts, steps = places.restart, places.step
    for (restart, step), same_step in groupby(_order(places), key=lambda i: (restarts[i], steps[i])):
        if step == NO_STEP:
            yield from (([index], False) for index in same_step)
            continue
        later = [r for r, reported in again.items() if step in reported] if again else ()
        gone = rules.superseded(group, restart, step, later)
        if superseded or not gone:
            yield list(same_step), gone


def read(found: Iterable[Found], group: str, places: Places, files: Sequence[Path], *, batches: bool) -> Iterator[Row]:
    """Read rows of :func:`series`."""
    with ExitStack() as stack:
        reader = _Reader(files, stack)
        for indices, gone in found:
            yield from _merged(group, indices, places, reader, batches, gone)


def _order(places: Places) -> Sequence[int]:
    """Indices by restart, step (none last), rank and seq."""
    restart, step, rank, seq = places.restart, places.step, places.rank, places.seq
    count = len(places)
    if count and restart[0] == restart[-1] and rank[0] == rank[-1] and min(step) != NO_STEP:
        before = iter(step)
        next(before)
        if all(map(lt, step, before)):  # one process, growing steps: as they stand
            return range(count)
    return sorted(range(count), key=lambda i: (restart[i], step[i] == NO_STEP, step[i], rank[i], seq[i]))


def _reported_late(places: Places, rules: Supersession, group: str) -> dict[int, set[int]]:
    """Restart -> the steps it reported although its first row in the group has a larger one."""
    late: dict[int, set[int]] = {}
    for restart, step in zip(places.restart, places.step, strict=True):
        if step != NO_STEP and step < rules.first(group, restart):
            late.setdefault(restart, set()).add(step)
    return late


class _Reader:
    """Reads lines by place; opens each file once."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        self._files, self._stack = files, stack
        self._open: dict[int, int] = {}

    def record(self, places: Places, index: int) -> dict[str, Any] | None:
        file = places.file[index]
        fd = self._open.get(file)
        if fd is None:
            fd = self._open[file] = os.open(self._files[file], os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, fd)
        return decode(os.pread(fd, places.size[index], places.offset[index]))


def _merged(
    group: str, indices: list[int], places: Places, reader: _Reader, batches: bool, gone: bool
) -> Iterator[Row]:
    """One row from the rows of one restart and step; nothing if none can be read any more."""
    from det_core.journal._record import Row

    found = [(i, r) for i in indices if (r := reader.record(places, i)) is not None]
    if not found:
        return
    first, record = found[0]
    metrics: dict[str, Any] = record["metrics"]
    given = record.get("batch_metrics")
    conflicts: list[str] = []
    for _, other in found[1:]:
        for key, value in other["metrics"].items():
            if key not in metrics:
                metrics[key] = value
            elif not same(metrics[key], value) and key not in conflicts:
                conflicts.append(key)
        given = other.get("batch_metrics") if given is None else given
    yield Row(
        group=group,
        steps_completed=record["steps_completed"],
        metrics=metrics,
        time=record["time"],
        restart=places.restart[first],
        rank=places.rank[first],
        seq=places.seq[first],
        superseded=gone,
        conflicts=tuple(conflicts),
        batch_metrics=given if batches else None,
    )
