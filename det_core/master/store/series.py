"""Series of reported metrics: the rows of a group by step, merged over ranks, with superseded rows marked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import inf, isfinite
from operator import gt, itemgetter, lt
from typing import Any, NamedTuple, TypedDict

from sqlalchemy import Select, bindparam, null, select, tuple_
from sqlalchemy.orm import Session

from det_core.master.store import _writers
from det_core.master.store._writers import Visible
from det_core.master.store.models import NO_STEP, Metric, Record, loads

CHUNK_ROWS = 2000
"""Rows that are read from the database at a time."""
_M = Metric.__table__.c
_KEY = (_M.step, _M.run_id, _M.restart, _M.rank, _M.seq)
_Stored = tuple[Any, ...]
"""Row as it is stored: its key, then time, metrics and batch metrics."""


class Cursor(NamedTuple):
    """Position in a series, to continue after it."""

    step: int
    run_id: int
    restart: int
    rank: int
    seq: int


class MetricRow(NamedTuple):
    """One row of a series.

    Attributes:
        group: Metric group.
        steps_completed: Step; None for rows without one, which come last.
        metrics: Values by key of all ranks; where two differ, that of the lowest rank.
        batch_metrics: Values per batch, if they were asked for.
        time: Seconds since the epoch.
        run_id: Run of the trial that reported it.
        superseded: Whether a later attempt replaced it.
        cursor: Position to continue after it.
    """

    group: str
    steps_completed: int | None
    metrics: dict[str, Any]
    batch_metrics: list[dict[str, Any]] | None
    time: float
    run_id: int
    superseded: bool
    cursor: Cursor


class KeySummary(TypedDict):
    """Numbers of one key. Those that are not finite count, but are in no sum, min, max or mean."""

    count: int
    sum: float
    min: float | None
    max: float | None
    mean: float | None
    last: float
    type: str


@dataclass(frozen=True)
class Query:
    """Rows of a trial's group to read, and how.

    Attributes:
        trial_id: Trial.
        group: Metric group.
        visible: Rule for superseded rows.
        superseded: Whether to include superseded rows.
        batches: Whether to include batch metrics.
        step: Only the rows of this step; None for all.
    """

    trial_id: int
    group: str
    visible: Visible
    superseded: bool = False
    batches: bool = False
    step: int | None = None


def read(
    session: Session,
    trial_id: int,
    group: str,
    *,
    superseded: bool = False,
    batches: bool = False,
    after: Cursor | None = None,
    limit: int | None = 10_000,
) -> list[MetricRow]:
    """Return the rows of a group by step, each step once.

    Args:
        session: Session that reads.
        trial_id: Trial; an unknown one has no rows.
        group: Metric group; an unknown one has no rows.
        superseded: Whether to include rows that a later attempt replaced.
        batches: Whether to include batch metrics.
        after: Cursor of the row to continue after.
        limit: Maximum number of rows, except that rows of one step stay together; None for all.
    """
    visible = Visible(_writers.of_trial(session, trial_id))
    result: list[MetricRow] = []
    for rows in steps(session, Query(trial_id, group, visible, superseded, batches), after=after):
        result += rows
        if limit is not None and len(result) >= limit:
            break
    return result


def steps(
    session: Session, query: Query, *, after: Cursor | None = None, newest_first: bool = False
) -> Iterator[list[MetricRow]]:
    """Yield the rows of each step that has any to show; of the rows without a step, each alone."""
    for _, stored in groupby(_stored_rows(session, query, after, newest_first), key=_step_key):
        rows = list(stored)
        if newest_first:
            rows.reverse()
        if shown := _shown(query, rows):
            yield shown


def merged_steps(group: str, rows: Iterable[_Stored]) -> list[MetricRow]:
    """Return one row for each step of stored rows, that of its last attempt."""
    query = Query(0, group, Visible([]))
    return [row for _, stored in groupby(rows, key=_step_key) for row in _shown(query, list(stored))]


def groups(session: Session, trial_id: int) -> list[str]:
    """Return the names of a trial's metric groups, sorted."""
    return sorted({name for writer in _writers.of_trial(session, trial_id) for name in writer.groups})


def summaries(session: Session, trial_id: int) -> dict[str, dict[str, KeySummary]]:
    """Return a summary of each key of each group, of the rows that count; reads all of them."""
    writers = _writers.of_trial(session, trial_id)
    visible = Visible(writers)
    result: dict[str, dict[str, KeySummary]] = {}
    for group in sorted({name for writer in writers for name in writer.groups}):
        values: defaultdict[str, _Numbers] = defaultdict(_Numbers)
        for rows in steps(session, Query(trial_id, group, visible)):
            for row in rows:
                for key, value in row.metrics.items():
                    if type(value) is float or type(value) is int:
                        values[key].add(value)
        result[group] = {key: numbers.summary() for key, numbers in values.items()}
    return result


def records(session: Session, trial_id: int, *, kind: str | None = None, run_id: int | None = None) -> Sequence[Record]:
    """Return the records of a trial by run, restart, rank and sequence number; of one kind or run if given."""
    statement = select(Record).where(Record.trial_id == trial_id)
    if kind is not None:
        statement = statement.where(Record.kind == kind)
    if run_id is not None:
        statement = statement.where(Record.run_id == run_id)
    return session.scalars(statement.order_by(Record.run_id, Record.restart, Record.rank, Record.seq)).all()


@dataclass
class _Numbers:
    """Totals of the numbers of one key."""

    count: int = 0
    finite: int = 0
    sum: float = 0.0
    low: float = inf
    high: float = -inf
    last: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.last = value
        try:
            is_finite = isfinite(value)
        except OverflowError:  # an integer of over 308 digits
            is_finite = False
        if is_finite:
            self.finite += 1
            self.sum += value
            self.low = min(self.low, value)
            self.high = max(self.high, value)

    def summary(self) -> KeySummary:
        result = KeySummary(
            count=self.count, sum=self.sum, min=None, max=None, mean=None, last=self.last, type="number"
        )
        if self.finite:
            result["min"] = self.low
            result["max"] = self.high
            result["mean"] = self.sum / self.finite
        return result


def _step_key(row: _Stored) -> Any:
    if row[0] == NO_STEP:
        return row[:5]  # rows without a step are not merged
    return row[0]


def _shown(query: Query, rows: Sequence[_Stored]) -> list[MetricRow]:
    """Return the rows of one step: one of each attempt, of which only the last may count."""
    step, run, restart, *_ = place = Cursor(*rows[-1][:5])  # continuing after one is continuing after all of the step
    if len(rows) == 1:
        superseded = step != NO_STEP and step >= query.visible.beyond(query.group, (run, restart))
        if superseded and not query.superseded:
            return []
        return [_merged(query.group, rows, superseded, place)]
    shown = []
    for attempt, stored in groupby(rows, key=itemgetter(1, 2)):
        superseded = attempt != (run, restart) or step >= query.visible.beyond(query.group, attempt)
        if query.superseded or not superseded:
            shown.append(_merged(query.group, list(stored), superseded, place))
    return shown


def _merged(group: str, rows: Sequence[_Stored], superseded: bool, place: Cursor) -> MetricRow:
    (step, run, _, _, _, time, text, batches), *others = rows
    metrics: dict[str, Any] = loads(text)
    for *_, text, more in others:
        metrics = {**loads(text), **metrics}
        if batches is None:
            batches = more
    return MetricRow(
        group,
        None if step == NO_STEP else step,
        metrics,
        None if batches is None else loads(batches),
        time,
        run,
        superseded,
        place,
    )


def _stored_rows(session: Session, query: Query, after: Cursor | None, newest_first: bool) -> Iterator[_Stored]:
    """Yield rows as they are stored, by their key; newest first only those with a step."""
    ordered = _ordered(query.batches, query.step is not None, newest_first)
    conn = session.connection()
    given = {"trial": query.trial_id, "group": query.group, "step": query.step, "rows": CHUNK_ROWS}
    while True:
        chunk = ordered
        if after is not None:
            compare = lt if newest_first else gt
            chunk = ordered.where(compare(tuple_(*_KEY), tuple(after)))
        rows = [tuple(row) for row in conn.execute(chunk, given)]
        yield from rows
        if len(rows) < CHUNK_ROWS:
            return
        after = Cursor(*rows[-1][:5])


@cache
def _ordered(batches: bool, one_step: bool, newest_first: bool) -> Select[Any]:
    """Return the statement of the first rows of a trial's group; SQLAlchemy takes longer to build it than to run it."""
    column = _M.batch_metrics if batches else null().label("batch_metrics")
    chosen = select(*_KEY, _M.time, _M.metrics, column)
    chosen = chosen.where(_M.trial_id == bindparam("trial"), _M.grp == bindparam("group"))
    if one_step:
        chosen = chosen.where(_M.step == bindparam("step"))
    order: list[Any] = list(_KEY)
    if newest_first:
        chosen = chosen.where(_M.step < NO_STEP)
        order = [key.desc() for key in _KEY]
    return chosen.order_by(*order).limit(bindparam("rows"))
