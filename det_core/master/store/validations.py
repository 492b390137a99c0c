"""Validations of trials. The best, the latest and the number of steps are columns of a trial.

The transaction that takes in a report sets them: from the steps that it reported as long as these cannot be superseded
or supersede others, and otherwise from all rows. So lists of trials are filtered, sorted and paged by SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from math import inf, isnan
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, func, select, tuple_, union_all, update
from sqlalchemy.orm import Session

from det_core._json import is_number
from det_core.master.store import _writers, series
from det_core.master.store._writers import Visible, Writer
from det_core.master.store.models import Experiment, Metric, Trial
from det_core.master.store.series import MetricRow, Query

VALIDATION = "validation"
"""Metric group of validations."""
_T = Trial.__table__.c
_M = Metric.__table__.c
_W = Writer.__table__.c
_NOTHING_SUPERSEDED = Visible([])
BY_ID: list[ColumnElement[Any]] = [_T.id.asc()]
"""Order of trials by their IDs."""


def _latest_and_best_statement() -> Select[Any]:
    """Return the statement of the rows at the latest and the best step of some trials."""
    # Either join looks its rows up by the primary key; an OR of both would read all validations.
    trial = (_T.id, _T.latest_step, _T.best_step)
    row = (_M.step, _M.run_id, _M.restart, _M.rank, _M.seq, _M.time, _M.metrics)
    selects = [
        select(*trial, *row)
        .join(Metric.__table__, (_M.trial_id == _T.id) & (_M.grp == VALIDATION) & (_M.step == step))
        .where(_T.id.in_(bindparam("trials", expanding=True)))
        for step in (_T.latest_step, _T.best_step)
    ]
    union = union_all(selects[0], selects[1].where(_T.latest_step != _T.best_step)).subquery()
    both = union.c
    return select(union).order_by(both.id, both.step, both.run_id, both.restart, both.rank, both.seq)


def _reported_statement() -> Select[Any]:
    """Return the statement of a trial's columns, and of whether it has later and earlier attempts."""
    attempt = tuple_(_W.run_id, _W.restart)
    given = tuple_(bindparam("run"), bindparam("restart"))
    of_trial = select(_W.trial_id).where(_W.trial_id == bindparam("trial"))
    later = of_trial.where(attempt > given).exists()
    earlier = of_trial.where(attempt < given).exists()
    columns = (_T.steps, _T.latest_step, _T.best_step, _T.best, _T.experiment_id)
    return select(*columns, later, earlier).where(_T.id == bindparam("trial"))


# Built once: SQLAlchemy takes longer to build them than the database to answer.
_LATEST_AND_BEST = _latest_and_best_statement()
_REPORTED = _reported_statement()
_SET = (
    update(Trial)
    .where(_T.id == bindparam("trial"))
    .values({name: bindparam(name) for name in ("steps", "latest_step", "best_step", "best")})
)


@dataclass(frozen=True)
class Validation:
    """Validation of a trial, and the value of one metric in it."""

    trial_id: int
    value: float
    row: MetricRow


class BestTrial(NamedTuple):
    """Trial with the best validation of an experiment, and its value of the searched metric."""

    trial_id: int
    value: float


@dataclass(frozen=True)
class Columns:
    """Columns of a trial that summarize its reports.

    Attributes:
        steps: Largest step that counts; 0 if there is none.
        latest_step: Step of the latest validation, or None.
        best_step: Step of the best validation, or None.
        best: Value of the searched metric there; None also for NaN, which SQLite cannot store.
    """

    steps: int = 0
    latest_step: int | None = None
    best_step: int | None = None
    best: float | None = None


def number(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the number of a name, or at its dotted path, or None."""
    value: Any = metrics.get(name)
    if value is None and "." in name:
        value = metrics
        for part in name.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
    if not is_number(value):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of over 308 digits
        return inf if value > 0 else -inf


def follow(
    session: Session, writer: Writer, *, starts_changed: bool, highest: int | None, validated: AbstractSet[int]
) -> None:
    """Set the columns of a trial after reports.

    Args:
        session: Session that writes.
        writer: Writer of the reports, already stored.
        starts_changed: Whether :meth:`Writer.starts` changed with them.
        highest: Largest step that was reported, or None.
        validated: Steps of the validations among them.
    """
    given = {"trial": writer.trial_id, "run": writer.run_id, "restart": writer.restart}
    row = session.connection().execute(_REPORTED, given).one_or_none()
    if row is None:
        return
    *stored, experiment_id, has_later, has_earlier = row
    columns = Columns(*stored)
    changed: Columns | None = None
    if not has_later and not (has_earlier and starts_changed):
        changed = _advanced(session, writer.trial_id, experiment_id, columns, highest, validated)
    if changed is None:
        changed = _computed(session, writer.trial_id, *_objective(session, experiment_id))
    if changed != columns:
        _set(session, writer.trial_id, changed)


def recompute(session: Session, trial_id: int, metric: str, *, smaller_is_better: bool) -> None:
    """Set the columns of a trial from all its rows."""
    _set(session, trial_id, _computed(session, trial_id, metric, smaller_is_better))


def best_trials(session: Session, experiment_ids: Sequence[int], *, smaller_is_better: bool) -> dict[int, BestTrial]:
    """Return the best trial of each experiment with a validation; of equals the first, NaN as the worst.

    Args:
        session: Session that reads.
        experiment_ids: Experiments.
        smaller_is_better: Whether smaller values are better in all of them.
    """
    place = func.row_number().over(partition_by=_T.experiment_id, order_by=best_first(smaller_is_better))
    chosen = _T.experiment_id.in_(experiment_ids) & _T.best_step.is_not(None)
    ranked = select(_T.experiment_id, _T.id, _T.best, place.label("place")).where(chosen).subquery()
    rows = session.execute(select(ranked).where(ranked.c.place == 1))
    return {experiment: BestTrial(trial, _value(best)) for experiment, trial, best, _ in rows}


def best_first(smaller_is_better: bool) -> list[ColumnElement[Any]]:
    """Return the order of trials by their best validation: NaN after all numbers, none last, then by ID."""
    best = _T.best.asc() if smaller_is_better else _T.best.desc()
    return [_T.best_step.is_(None), _T.best.is_(None), best, _T.id.asc()]


def bests(session: Session, experiment_id: int) -> dict[int, float]:
    """Return the best value of each trial of an experiment that has a validation of the searched metric."""
    chosen = (_T.experiment_id == experiment_id) & _T.best_step.is_not(None)
    rows = session.execute(select(_T.id, _T.best).where(chosen).order_by(_T.id))
    return {trial: _value(best) for trial, best in rows}


def latest_and_best(session: Session, trial_ids: Sequence[int]) -> tuple[dict[int, MetricRow], dict[int, MetricRow]]:
    """Return the latest and the best validation of each of some trials."""
    latest: dict[int, MetricRow] = {}
    best: dict[int, MetricRow] = {}
    if not trial_ids:
        return latest, best
    stored = session.connection().execute(_LATEST_AND_BEST, {"trials": list(trial_ids)})
    for (trial_id, latest_step, best_step), rows in groupby(stored, itemgetter(0, 1, 2)):
        for merged in series.merged_steps(VALIDATION, ((*columns[3:], None) for columns in rows)):
            if merged.steps_completed == latest_step:
                latest[trial_id] = merged
            if merged.steps_completed == best_step:
                best[trial_id] = merged
    return latest, best


def of_trial(session: Session, trial_id: int, metric: str) -> list[Validation]:
    """Return the validations of a trial that count and have ``metric``, by step."""
    query = Query(trial_id, VALIDATION, Visible(_writers.of_trial(session, trial_id)))
    return _with_metric(trial_id, metric, (row for rows in series.steps(session, query) for row in rows))


def _with_metric(trial_id: int, metric: str, rows: Iterable[MetricRow]) -> list[Validation]:
    found = [(row, number(row.metrics, metric)) for row in rows if row.steps_completed is not None]
    return [Validation(trial_id, value, row) for row, value in found if value is not None]


def _advanced(
    session: Session,
    trial_id: int,
    experiment_id: int,
    columns: Columns,
    highest: int | None,
    validated: AbstractSet[int],
) -> Columns | None:
    """Return the columns after reports that only supersede rows of their own steps; None if more must be read."""
    steps = max(columns.steps, highest or 0)
    if not validated:
        return Columns(steps, columns.latest_step, columns.best_step, columns.best)
    metric, smaller_is_better = _objective(session, experiment_id)
    latest_step = max(validated | {columns.latest_step or 0})
    best_step = columns.best_step
    best = columns.best
    for step in sorted(validated):
        # Other ranks may have reported this step too.
        ((row,),) = series.steps(session, Query(trial_id, VALIDATION, _NOTHING_SUPERSEDED, step=step))
        value = number(row.metrics, metric)
        if step == best_step:
            if value is None or (_value(best) != value and not (isnan(value) and best is None)):
                return None  # what was best has another value now
        elif value is not None:
            mine = _rank(value, step, smaller_is_better)
            if best_step is None or mine < _rank(_value(best), best_step, smaller_is_better):
                best_step = step
                best = _column(value)
    return Columns(steps, latest_step, best_step, best)


def _computed(session: Session, trial_id: int, metric: str, smaller_is_better: bool) -> Columns:
    """Return the columns of a trial from all its rows."""
    writers = _writers.of_trial(session, trial_id)
    visible = Visible(writers)
    highs = [
        min(steps.high, visible.beyond(name, writer.attempt) - 1)
        for writer in writers
        for name, steps in writer.groups.items()
        if steps.high is not None
    ]
    rows = [row for rows in series.steps(session, Query(trial_id, VALIDATION, visible)) for row in rows]
    counted = [row.steps_completed for row in rows if row.steps_completed is not None]
    found = [(v.value, v.row.steps_completed or 0) for v in _with_metric(trial_id, metric, rows)]
    best, best_step = min(found, key=lambda v: _rank(v[0], v[1], smaller_is_better), default=(None, None))
    return Columns(max(highs, default=0), max(counted, default=None), best_step, _column(best))


def _set(session: Session, trial_id: int, columns: Columns) -> None:
    session.connection().execute(_SET, {"trial": trial_id, **vars(columns)})


_CONFIG = select(Experiment.config).where(Experiment.id == bindparam("experiment"))  # built once


def _objective(session: Session, experiment_id: int) -> tuple[str, bool]:
    """Return the searched metric of an experiment, and whether smaller values are better."""
    config = session.connection().execute(_CONFIG, {"experiment": experiment_id}).scalar_one()
    searcher = config.get("searcher") or {}
    return str(searcher.get("metric", "")), bool(searcher.get("smaller_is_better", True))


def _rank(value: float, step: int, smaller_is_better: bool) -> tuple[bool, float, int]:
    if isnan(value):
        return True, 0.0, step
    if not smaller_is_better:
        value = -value
    return False, value, step


def _column(value: float | None) -> float | None:
    """Return a value as a row's ``best`` keeps it: NaN as NULL, for SQLite knows no NaN."""
    if value is None or isnan(value):
        return None
    return value


def _value(best: float | None) -> float:
    """Return the value that a row's ``best`` stands for."""
    return float("nan") if best is None else best
