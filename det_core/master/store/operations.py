"""The operations that the search gives to trials: train to a length, then report a metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.orm import Session

from det_core import _clock
from det_core._json import equal_json
from det_core.errors import StoreConflict
from det_core.master.store._rows import many, one
from det_core.master.store._schema import OPERATIONS, TRIALS


@dataclass(frozen=True)
class OperationRow:
    """One operation of a trial: its ``ordinal`` counts from 0, its ``length`` from the trial's start."""

    trial_id: int
    ordinal: int
    length: int
    completed: bool
    metric: Any
    create_time: float
    end_time: float | None


def add(session: Session, trial_id: int, length: int) -> OperationRow:
    """The trial's next operation, which becomes its current one."""
    last = current(session, trial_id)
    ordinal = 0 if last is None else last.ordinal + 1
    row = OperationRow(trial_id, ordinal, length, False, None, _clock.now(), None)
    session.execute(OPERATIONS.insert().values(vars(row)))
    return row


def current(session: Session, trial_id: int) -> OperationRow | None:
    """The operation given last, completed or not; None if there was none yet."""
    statement = select(OPERATIONS).where(OPERATIONS.c.trial_id == trial_id).order_by(OPERATIONS.c.ordinal.desc())
    return one(session, statement.limit(1), OperationRow)


def current_of_experiment(session: Session, experiment_id: int) -> dict[int, OperationRow]:
    """Trial -> its current operation, for the trials of an experiment that have one."""
    trials = select(TRIALS.c.id).where(TRIALS.c.experiment_id == experiment_id)
    return _current(session, OPERATIONS.c.trial_id.in_(trials.scalar_subquery()))


def current_of_trials(session: Session, trial_ids: Sequence[int]) -> dict[int, OperationRow]:
    """Return the current operation of each of some trials that has one."""
    if not trial_ids:
        return {}
    return _current(session, OPERATIONS.c.trial_id.in_(trial_ids))


def _current(session: Session, chosen: ColumnElement[bool]) -> dict[int, OperationRow]:
    last = (
        select(OPERATIONS.c.trial_id, func.max(OPERATIONS.c.ordinal).label("ordinal"))
        .where(chosen)
        .group_by(OPERATIONS.c.trial_id)
        .subquery()
    )
    statement = select(OPERATIONS).join(
        last, and_(last.c.trial_id == OPERATIONS.c.trial_id, last.c.ordinal == OPERATIONS.c.ordinal)
    )
    return {row.trial_id: row for row in many(session, statement, OperationRow)}


def of_trial(session: Session, trial_id: int) -> Sequence[OperationRow]:
    """All operations of a trial, in order."""
    statement = select(OPERATIONS).where(OPERATIONS.c.trial_id == trial_id).order_by(OPERATIONS.c.ordinal)
    return many(session, statement, OperationRow)


def any_completed(session: Session, experiment_id: int) -> bool:
    """Whether a trial of an experiment has completed an operation."""
    joined = select(OPERATIONS.c.trial_id).join(TRIALS, TRIALS.c.id == OPERATIONS.c.trial_id)
    where = (TRIALS.c.experiment_id == experiment_id) & OPERATIONS.c.completed
    return session.execute(joined.where(where).limit(1)).first() is not None


def complete(session: Session, trial_id: int, length: int, metric: Any) -> bool:
    """Note that the trial's current operation is done.

    Returns:
        Whether it is news: False for a repeat, also of an earlier operation.

    Raises:
        StoreConflict: the operation of that length is not the current one, or was completed with another metric.
    """
    row = current(session, trial_id)
    if row is not None and row.length == length and not row.completed:
        where = (OPERATIONS.c.trial_id == trial_id) & (OPERATIONS.c.ordinal == row.ordinal)
        session.execute(update(OPERATIONS).where(where).values(completed=True, metric=metric, end_time=_clock.now()))
        return True
    done = [o for o in of_trial(session, trial_id) if o.completed and o.length == length]
    if any(equal_json(o.metric, metric) for o in done):
        return False
    if done:
        raise StoreConflict(
            f"trial {trial_id}: the operation of length {length} was completed with {done[-1].metric!r} already, "
            f"so it cannot be with {metric!r}"
        )
    standing = "there is none" if row is None else f"the current one is of length {row.length}"
    raise StoreConflict(f"trial {trial_id} has no operation of length {length} to complete: {standing}")
