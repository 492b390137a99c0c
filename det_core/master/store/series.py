"""Series of reported metrics: the rows of a group by step, merged over ranks, with superseded rows marked.

An attempt is a run of a trial, or a restart in it. The rules are those of the journal's own reader. In each group a row
is superseded by a later attempt that

- reported the same step, or
- whose first row in that group has the same or a smaller step, or
- restored a checkpoint of a smaller step.

For rows of the one-report route the wire contract's rule (§5.2) holds: each row, not only the first, supersedes those
of earlier attempts from its step on, and those of other groups beyond its step. Rows without a step, and those of the
groups of ``SYSTEM``, are never superseded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypedDict

from sqlalchemy import Boolean, bindparam, case, select, tuple_
from sqlalchemy.orm import Session

from det_core.master.store.models import NO_STEP, REPORTED, SYSTEM, Metric, Record, Writer, loads

CHUNK_ROWS = 2000
"""Rows that are read from the database at a time."""
Attempt = tuple[int, int]
"""Run and restart."""
Limits = Mapping[Attempt, int]
"""Step from which on the rows of each attempt are superseded; without an entry none are."""
_Stored = Sequence[Any]
"""Row as it is stored: its key, then time, metrics and batch metrics."""


class Cursor(NamedTuple):
    """Position in a series, to continue after it."""

    step: int
    run_id: int
    restart: int
    rank: int
    seq: int


START = Cursor(-1, -1, -1, -1, -1)
"""Position before all rows."""
_M = Metric.__table__.c
_KEY = (_M.step, _M.run_id, _M.restart, _M.rank, _M.seq)
# Built once: SQLAlchemy takes longer to build it than the database to answer.
_ROWS = (
    select(*_KEY, _M.time, _M.metrics, case((bindparam("batches", type_=Boolean), _M.batch_metrics)).label("batches"))
    .where(_M.trial_id == bindparam("trial"), _M.grp == bindparam("group"), _M.step <= bindparam("last"))
    .where(tuple_(*_KEY) > tuple_(*(bindparam(f"after_{name}", type_=_M.step.type) for name in Cursor._fields)))
    .order_by(*_KEY)
)


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
    limits = superseded_from(writers(session, trial_id), group)
    result: list[MetricRow] = []
    for rows in steps(session, trial_id, group, limits, superseded=superseded, batches=batches, after=after or START):
        result += rows
        if limit is not None and len(result) >= limit:
            break
    return result


def steps(
    session: Session,
    trial_id: int,
    group: str,
    limits: Limits,
    *,
    superseded: bool = False,
    batches: bool = False,
    after: Cursor = START,
) -> Iterator[list[MetricRow]]:
    """Yield the rows of each step that has any to show; of the rows without a step, each alone."""
    stored = _stored_rows(session, trial_id, group, batches=batches, after=after)
    for _, rows in groupby(stored, key=_step_key):
        if shown := _shown(group, list(rows), limits, superseded=superseded):
            yield shown


def step_rows(session: Session, trial_id: int, group: str, step: int) -> list[MetricRow]:
    """Return the row of a step, that of its last attempt; none if nobody reported it."""
    after = START._replace(step=step)
    return merged_steps(group, _stored_rows(session, trial_id, group, after=after, last=step))


def merged_steps(group: str, stored: Iterable[_Stored]) -> list[MetricRow]:
    """Return one row for each step of stored rows, that of its last attempt."""
    return [row for _, rows in groupby(stored, key=_step_key) for row in _shown(group, list(rows), {})]


def groups(session: Session, trial_id: int) -> list[str]:
    """Return the names of a trial's metric groups, sorted."""
    return sorted({name for writer in writers(session, trial_id) for name in writer.groups})


def summaries(session: Session, trial_id: int) -> dict[str, dict[str, KeySummary]]:
    """Return a summary of each key of each group, of the rows that count; reads all of them."""
    every = writers(session, trial_id)
    result: dict[str, dict[str, KeySummary]] = {}
    for group in groups(session, trial_id):
        numbers: dict[str, _Numbers] = {}
        for rows in steps(session, trial_id, group, superseded_from(every, group)):
            for row in rows:
                for key, value in row.metrics.items():
                    if type(value) is float or type(value) is int:
                        numbers.setdefault(key, _Numbers()).add(value)
        result[group] = {key: of_key.summary() for key, of_key in numbers.items()}
    return result


def records(session: Session, trial_id: int, *, kind: str | None = None, run_id: int | None = None) -> Sequence[Record]:
    """Return the records of a trial by run, restart, rank and sequence number; of one kind or run if given."""
    statement = select(Record).where(Record.trial_id == trial_id)
    if kind is not None:
        statement = statement.where(Record.kind == kind)
    if run_id is not None:
        statement = statement.where(Record.run_id == run_id)
    return session.scalars(statement.order_by(Record.run_id, Record.restart, Record.rank, Record.seq)).all()


def writers(session: Session, trial_id: int) -> Sequence[Writer]:
    """Return the writers of a trial."""
    return session.scalars(select(Writer).where(Writer.trial_id == trial_id)).all()


def superseded_from(every: Iterable[Writer], group: str) -> Limits:
    """Return the step from which on the rows of each attempt in a group are superseded, by all writers of a trial."""
    limits: dict[Attempt, int] = {}
    if group in SYSTEM:
        return limits
    limit = NO_STEP  # set by the attempts after the current one, and not by its own other ranks
    newest_first = sorted(every, key=attrgetter("attempt"), reverse=True)
    for attempt, ranks in groupby(newest_first, key=attrgetter("attempt")):
        limits[attempt] = limit
        limit = min(limit, *(_begins(writer, group) for writer in ranks))
    return limits


def _begins(writer: Writer, group: str) -> int:
    """Return the step from which on a writer supersedes earlier attempts in a group; NO_STEP if it does not."""
    begins = NO_STEP if writer.restored is None else writer.restored + 1
    for name, reported in writer.steps.items():
        if name in SYSTEM:
            continue
        if writer.rank == REPORTED:
            begins = min(begins, reported.low if name == group else reported.low + 1)
        elif name == group:
            begins = min(begins, reported.first)
    return begins


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
        if abs(value) <= sys.float_info.max:  # an integer may have over 308 digits
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


def _shown(group: str, rows: Sequence[_Stored], limits: Limits, *, superseded: bool = False) -> list[MetricRow]:
    """Return the rows of one step: one of each attempt, of which only the last may count."""
    cursor = Cursor(*rows[-1][:5])  # continuing after one is continuing after all of the step
    shown = []
    for attempt, stored in groupby(rows, key=itemgetter(1, 2)):
        is_last = attempt == cursor[1:3]
        counts = is_last and (cursor.step == NO_STEP or cursor.step < limits.get(attempt, NO_STEP))
        if counts or superseded:
            shown.append(_merged(group, list(stored), not counts, cursor))
    return shown


def _merged(group: str, rows: Sequence[_Stored], superseded: bool, cursor: Cursor) -> MetricRow:
    """Return the row of all ranks of an attempt at a step."""
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
        cursor,
    )


def _stored_rows(
    session: Session, trial_id: int, group: str, *, batches: bool = False, after: Cursor, last: int = NO_STEP
) -> Iterator[_Stored]:
    """Yield rows by their key, up to those of the step ``last``; no more than a chunk of them is in memory."""
    place = {f"after_{name}": value for name, value in after._asdict().items()}
    given = {"trial": trial_id, "group": group, "batches": batches, "last": last, **place}
    # PostgreSQL's driver would fetch all rows at once; SQLite's fetches them one by one in any case.
    options = {"stream_results": True, "max_row_buffer": CHUNK_ROWS}
    with session.connection().execute(_ROWS, given, execution_options=options) as result:
        yield from result
