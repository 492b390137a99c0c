"""Validations of trials. The best, the latest and the number of steps are columns of a trial.

The transaction that takes in a report sets them: from the steps that it reported as long as these cannot be superseded
or supersede others, and otherwise from all rows. So lists of trials are filtered, sorted and paged by SQL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, isnan
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, func, select, union_all
from sqlalchemy.orm import Session

from det_core._json import is_number
from det_core.master.store import series
from det_core.master.store.models import NO_STEP, Experiment, Metric, Trial, Writer
from det_core.master.store.series import MetricRow

VALIDATION = "validation"
"""Metric group of validations."""
_T = Trial.__table__.c
_M = Metric.__table__.c
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


# Built once: SQLAlchemy takes longer to build them than the database to answer.
_LATEST_AND_BEST = _latest_and_best_statement()
_ATTEMPTS = select(Writer.run_id, Writer.restart).where(Writer.trial_id == bindparam("trial")).distinct()
_CONFIG = select(Experiment.config).where(Experiment.id == bindparam("experiment"))


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

    def after(self, row: MetricRow, metric: str, smaller_is_better: bool) -> Columns:
        """Return the columns after a validation; one without a step changes nothing."""
        step = row.steps_completed
        if step is None:
            return self
        columns = replace(self, latest_step=max(self.latest_step or 0, step))
        value = number(row.metrics, metric)
        if value is None:
            return columns
        place = _rank(value, step, smaller_is_better)
        if self.best_step is None or place < _rank(_value(self.best), self.best_step, smaller_is_better):
            return replace(columns, best_step=step, best=None if isnan(value) else value)
        return columns


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
    session: Session, writer: Writer, steps: Collection[int], validated: Collection[int], *, starts_changed: bool
) -> None:
    """Set the columns of a trial after reports.

    Args:
        session: Session that writes.
        writer: Writer of the reports, which are stored.
        steps: Steps of the reports.
        validated: Steps of the validations among them.
        starts_changed: Whether it supersedes earlier attempts from other steps on than before.
    """
    trial = session.get(Trial, writer.trial_id)
    if trial is None:
        return
    columns = Columns(trial.steps, trial.latest_step, trial.best_step, trial.best)
    attempts = session.execute(_ATTEMPTS, {"trial": trial.id}).all()
    is_last = max(attempts) <= writer.attempt
    changed = None
    if is_last and (not starts_changed or min(attempts) == writer.attempt):
        changed = _advanced(session, trial, columns, steps, validated)
    if changed is None:
        changed = compute(session, trial.id, *_objective(session, trial))
    for name, value in vars(changed).items():
        setattr(trial, name, value)


def compute(session: Session, trial_id: int, metric: str, smaller_is_better: bool) -> Columns:
    """Return the columns of a trial from all its rows."""
    writers = series.writers(session, trial_id)
    highest = 0
    for group in {name for writer in writers for name in writer.steps}:
        limits = series.superseded_from(writers, group)
        for writer in writers:
            if group in writer.steps:
                limit = limits.get(writer.attempt, NO_STEP)
                highest = max(highest, min(writer.steps[group].high, limit - 1))
    columns = Columns(highest)
    for rows in series.steps(session, trial_id, VALIDATION, series.superseded_from(writers, VALIDATION)):
        for row in rows:
            columns = columns.after(row, metric, smaller_is_better)
    return columns


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


def of_trial(session: Session, trial_id: int, metric: str) -> list[tuple[MetricRow, float]]:
    """Return the validations of a trial that count and have ``metric``, by step, each with its value."""
    rows = series.read(session, trial_id, VALIDATION, limit=None)
    values = [(row, number(row.metrics, metric)) for row in rows if row.steps_completed is not None]
    return [(row, value) for row, value in values if value is not None]


def _advanced(
    session: Session, trial: Trial, columns: Columns, steps: Collection[int], validated: Collection[int]
) -> Columns | None:
    """Return the columns after reports that only supersede rows of their own steps; None if more must be read."""
    columns = replace(columns, steps=max([columns.steps, *steps]))
    if not validated:
        return columns
    metric, smaller_is_better = _objective(session, trial)
    for step in sorted(validated):
        (row,) = series.step_rows(session, trial.id, VALIDATION, step)  # other ranks may have reported it too
        value = number(row.metrics, metric)
        if step == columns.best_step and (value is None or repr(value) != repr(_value(columns.best))):
            return None  # the best has another value now
        columns = columns.after(row, metric, smaller_is_better)
    return columns


def _objective(session: Session, trial: Trial) -> tuple[str, bool]:
    """Return the searched metric of a trial, and whether smaller values are better."""
    config = session.connection().execute(_CONFIG, {"experiment": trial.experiment_id}).scalar_one()
    searcher = config.get("searcher") or {}
    return str(searcher.get("metric", "")), bool(searcher.get("smaller_is_better", True))


def _rank(value: float, step: int, smaller_is_better: bool) -> tuple[bool, float, int]:
    if isnan(value):
        return True, 0.0, step
    if not smaller_is_better:
        value = -value
    return False, value, step


def _value(best: float | None) -> float:
    """Return the value that a row's ``best`` stands for."""
    return float("nan") if best is None else best
