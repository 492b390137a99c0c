"""Operations of trials: train to a length, then report a metric."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import Session

from det_core.master.store.models import Operation, Trial


def current(session: Session, chosen: ColumnElement[bool]) -> dict[int, Operation]:
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
