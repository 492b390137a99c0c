"""The rows of one group as one series: in order, merged over ranks, superseded rows told apart."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core.journal._line import decode
from det_core.journal._read import NO_STEP, Places
from det_core.journal._seen import same
from det_core.journal._supersede import Supersession

if TYPE_CHECKING:
    from det_core.journal._record import Row


def series(
    group: str,
    places: Places,
    files: Sequence[Path],
    rules: Supersession,
    *,
    superseded: bool,
    batches: bool,
) -> Iterator[Row]:
    """Yield the rows of a group by restart and step; those without a step come last in their restart."""
    again = _reported_late(places, rules, group)
    with ExitStack() as stack:
        read = _Reader(files, stack)
        for (restart, step), same_step in groupby(_order(places), key=lambda i: (places.restart[i], places.step[i])):
            if step == NO_STEP:
                for index in same_step:
                    yield from _merged(group, [index], places, read, batches, False)
                continue
            later = [r for r, steps in again.items() if step in steps]
            gone = rules.superseded(group, restart, step, later)
            if superseded or not gone:
                yield from _merged(group, list(same_step), places, read, batches, gone)


def _order(places: Places) -> Sequence[int]:
    """Indices by restart, step (none last), rank and seq."""
    restart, step, rank, seq = places.restart, places.step, places.rank, places.seq
    return sorted(
        range(len(places)),
        key=lambda i: (restart[i], step[i] == NO_STEP, step[i], rank[i], seq[i]),
    )


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


def _merged(group: str, indices: list[int], places: Places, read: _Reader, batches: bool, gone: bool) -> Iterator[Row]:
    """One row from the rows of one restart and step; nothing if none can be read any more."""
    from det_core.journal._record import Row

    found = [(i, r) for i in indices if (r := read.record(places, i)) is not None]
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
