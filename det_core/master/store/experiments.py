"""Experiments."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from det_core.master.store.models import (
    Allocation,
    Experiment,
    Metric,
    Operation,
    Record,
    RunMetadata,
    SearcherEvent,
    Token,
    Trial,
    Writer,
)


def find(
    session: Session,
    *,
    states: Sequence[str] = (),
    name: str | None = None,
    newest_first: bool = False,
    by_start: bool = False,
    limit: int | None = None,
    offset: int = 0,
) -> tuple[Sequence[Experiment], int]:
    """Return experiments by ID, without deleted ones, and how many match without ``limit`` and ``offset``.

    Args:
        session: Session that reads.
        states: Only those in one of these; none for all.
        name: Only those whose name contains this in any case.
        newest_first: Whether to reverse the order.
        by_start: Whether to sort by start time, then by ID.
        limit: Maximum number.
        offset: Experiments to skip.
    """
    statement = select(Experiment).where(Experiment.state != "DELETED")
    if states:
        statement = statement.where(Experiment.state.in_(states))
    if name:
        statement = statement.where(func.lower(Experiment.name).contains(name.lower(), autoescape=True))
    total = session.scalars(select(func.count()).select_from(statement.subquery())).one()
    keys = [Experiment.start_time, Experiment.id] if by_start else [Experiment.id]
    statement = statement.order_by(*(key.desc() if newest_first else key for key in keys))
    return session.scalars(statement.limit(limit).offset(offset)).all(), total


def by_external_id(session: Session, external_id: str) -> Experiment | None:
    """Return the experiment to which a caller gave that name, deleted or not."""
    return session.scalar(select(Experiment).where(Experiment.external_id == external_id))


def erase(session: Session, experiment_id: int) -> None:
    """Delete all that belongs to an experiment but its own row and those of its trials and checkpoints."""
    trials = select(Trial.id).where(Trial.experiment_id == experiment_id).scalar_subquery()
    allocations = select(Allocation.id).where(Allocation.trial_id.in_(trials)).scalar_subquery()
    statements = [
        delete(Token).where(Token.allocation_id.in_(allocations)),
        delete(SearcherEvent).where(SearcherEvent.experiment_id == experiment_id),
    ]
    for kind in (Metric, Writer, Record, Operation, Allocation, RunMetadata):
        statements.append(delete(kind).where(kind.trial_id.in_(trials)))
    for statement in statements:
        session.execute(statement, execution_options={"synchronize_session": False})
