"""Metrics read back: the series of a group, merged over ranks, superseded rows told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, null, select, tuple_

from det_core.master.store import _writers
from det_core.master.store._reports import METRICS, NO_STEP
from det_core.master.store._rows import is_id
from det_core.master.store._types import loads
from det_core.master.store._visible import Visible

CHUNK = 2000
"""Rows that are read at a time."""
_M = METRICS.c
_KEY = (_M.step, _M.run_id, _M.restart, _M.rank, _M.seq)
_Kept = tuple[Any, ...]
"""A row as it is kept: its key, then time, metrics and batch metrics."""


class Cursor(NamedTuple):
    """A place in a series, to go on after it."""

    step: int
    run_id: int
    restart: int
    rank: int
    seq: int


class MetricRow(NamedTuple):
    """One row of a series.

    Attributes:
        group: its metric group.
        steps_completed: its step; None for rows that belong to none, which come last.
        metrics: values by key, those of all ranks; where two differ, that of the lowest rank.
        batch_metrics: what was given per batch, where asked for.
        time: when it was reported, in seconds since the epoch.
        run_id: the run of the trial that reported it.
        superseded: whether a later run took its place.
        cursor: to go on after it.
    """

    group: str
    steps_completed: int | None
    metrics: dict[str, Any]
    batch_metrics: list[dict[str, Any]] | None
    time: float
    run_id: int
    superseded: bool
    cursor: Cursor


@dataclass(frozen=True)
class Query:
    """Which rows of a trial's group to read, and how."""

    trial_id: int
    group: str
    visible: Visible
    superseded: bool = False
    batches: bool = False


def series(
    conn: Connection,
    trial_id: int,
    group: str,
    *,
    superseded: bool = False,
    batches: bool = False,
    after: Cursor | None = None,
    limit: int | None = 10_000,
) -> list[MetricRow]:
    """The rows of a group by step, each step once.

    Args:
        conn: where.
        trial_id: the trial; an unknown one has no rows.
        group: a metric group; an unknown one has no rows.
        superseded: also the rows that a later run took the place of.
        batches: also the batch metrics.
        after: the cursor of the row to go on after.
        limit: at most so many rows, but that the rows of one step stay together; None: all.
    """
    if not is_id(trial_id):
        return []
    visible = Visible(_writers.of_trial(conn, trial_id))
    found: list[MetricRow] = []
    for rows in steps(conn, Query(trial_id, group, visible, superseded, batches), after=after):
        found += rows
        if limit is not None and len(found) >= limit:
            break
    return found


def steps(
    conn: Connection, query: Query, *, after: Cursor | None = None, newest_first: bool = False
) -> Iterator[list[MetricRow]]:
    """Yield the rows of each step that has any to show (of the rows without a step, each by itself)."""
    for _, alike in groupby(_raw(conn, query, after, newest_first), key=_apart):
        rows = list(alike)
        if newest_first:
            rows.reverse()
        if shown := _shown(query, rows):
            yield shown


def _apart(row: _Kept) -> Any:
    return row[:5] if row[0] == NO_STEP else row[0]


def _shown(query: Query, rows: Sequence[_Kept]) -> list[MetricRow]:
    """The rows of one step: one of each attempt, of which the last may count."""
    step, run, restart, *_ = place = Cursor(*rows[-1][:5])  # to go on after one of them is to go on after all
    if len(rows) == 1:
        gone = step != NO_STEP and step >= query.visible.beyond(query.group, (run, restart))
        return [_merged(query.group, rows, gone, place)] if query.superseded or not gone else []
    found = []
    for attempt, alike in groupby(rows, key=itemgetter(1, 2)):
        gone = attempt != (run, restart) or step >= query.visible.beyond(query.group, attempt)
        if query.superseded or not gone:
            found.append(_merged(query.group, list(alike), gone, place))
    return found


def _merged(group: str, rows: Sequence[_Kept], gone: bool, place: Cursor) -> MetricRow:
    (step, run, _, _, _, time, text, batches), *others = rows
    metrics: dict[str, Any] = loads(text)
    for *_, text, more in others:
        metrics = {**loads(text), **metrics}
        batches = more if batches is None else batches
    return MetricRow(
        group,
        None if step == NO_STEP else step,
        metrics,
        None if batches is None else loads(batches),
        time,
        run,
        gone,
        place,
    )


def _raw(conn: Connection, query: Query, after: Cursor | None, newest_first: bool) -> Iterator[_Kept]:
    """Rows as they are kept, by their key; newest first: only those with a step."""
    columns = (*_KEY, _M.time, _M.metrics, _M.batch_metrics if query.batches else null().label("batch_metrics"))
    mine = select(*columns).where(_M.trial_id == query.trial_id, _M.grp == query.group)
    if newest_first:
        mine = mine.where(_M.step < NO_STEP)
    ordered = mine.order_by(*(key.desc() if newest_first else key for key in _KEY)).limit(CHUNK)
    while True:
        place = tuple_(*_KEY)
        chunk = ordered
        if after is not None:
            chunk = ordered.where(place < tuple(after) if newest_first else place > tuple(after))
        rows = [tuple(row) for row in conn.execute(chunk)]
        yield from rows
        if len(rows) < CHUNK:
            return
        after = Cursor(*rows[-1][:5])
