"""Trials, with their operations, their runs and the metadata that their scripts set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import Session

from det_core.master.store.models import Allocation, Experiment, Operation, RunMetadata, Trial


def create(session: Session, experiment_id: int, request_id: str, **values: Any) -> Trial:
    """Return the trial of an experiment with that request ID: the one there is, or a new one with these values."""
    row = by_request_id(session, experiment_id, request_id)
    if row is None:
        task_id = f"{experiment_id}.{request_id}"
        row = Trial(experiment_id=experiment_id, request_id=request_id, task_id=task_id, **values)
        session.add(row)
        session.flush()
    return row


def by_request_id(session: Session, experiment_id: int, request_id: str) -> Trial | None:
    """Return the trial to which the search of an experiment gave that name."""
    return session.scalar(select(Trial).where(Trial.experiment_id == experiment_id, Trial.request_id == request_id))


def by_task_id(session: Session, task_id: str) -> Trial | None:
    """Return the trial of a task."""
    return session.scalar(select(Trial).where(Trial.task_id == task_id))


def last_runs(session: Session) -> dict[str, int]:
    """Return the number of the last run of each task, but for those of deleted experiments."""
    statement = select(Trial.task_id, Trial.run_id).join(Experiment).where(Experiment.state != "DELETED")
    return {task_id: run_id for task_id, run_id in session.execute(statement)}


def of_experiment(session: Session, experiment_id: int, *, states: Sequence[str] = ()) -> Sequence[Trial]:
    """Return the trials of an experiment by ID, in one of ``states`` if any are given."""
    statement = select(Trial).where(Trial.experiment_id == experiment_id).order_by(Trial.id)
    if states:
        statement = statement.where(Trial.state.in_(states))
    return session.scalars(statement).all()


def count(session: Session, experiment_id: int, chosen: ColumnElement[bool]) -> int:
    """Return the number of an experiment's trials that meet a condition."""
    statement = select(func.count()).select_from(Trial).where(Trial.experiment_id == experiment_id, chosen)
    return session.scalars(statement).one()


def in_states(session: Session, states: Sequence[str], *, unmanaged: bool | None = None) -> Sequence[Trial]:
    """Return the trials of all experiments that are in one of ``states``, by ID."""
    statement = select(Trial).where(Trial.state.in_(states)).order_by(Trial.id)
    if unmanaged is not None:
        statement = statement.where(Trial.unmanaged == unmanaged)
    return session.scalars(statement).all()


def set_metadata(session: Session, trial_id: int, metadata: Mapping[str, Any]) -> None:
    """Replace the metadata of a trial (§5.4); its limits are the caller's to check."""
    session.merge(RunMetadata(trial_id=trial_id, values=dict(metadata)))


def metadata(session: Session, trial_id: int) -> dict[str, Any]:
    """Return the metadata of a trial; {} if none was set."""
    row = session.get(RunMetadata, trial_id)
    return {} if row is None else row.values


def current_operations(session: Session, chosen: ColumnElement[bool]) -> dict[int, Operation]:
    """Return the current operation of each trial that has one, of those that meet a condition."""
    last = (
        select(Operation.trial_id, func.max(Operation.ordinal).label("ordinal"))
        .join(Trial)
        .where(chosen)
        .group_by(Operation.trial_id)
        .subquery()
        .c
    )
    is_last = and_(last.trial_id == Operation.trial_id, last.ordinal == Operation.ordinal)
    return {row.trial_id: row for row in session.scalars(select(Operation).join(last.trial_id.table, is_last))}


def running_allocations(session: Session) -> Sequence[Allocation]:
    """Return all allocations that have not ended, oldest first."""
    statement = select(Allocation).where(Allocation.end_time.is_(None))
    return session.scalars(statement.order_by(Allocation.create_time, Allocation.id)).all()
