"""Allocations: the runs of a trial, each with its slots and its end."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from det_core.master.store.models import Allocation


def alive(session: Session) -> Sequence[Allocation]:
    """Return all allocations that have not ended, oldest first."""
    statement = select(Allocation).where(Allocation.end_time.is_(None))
    return session.scalars(statement.order_by(Allocation.create_time, Allocation.id)).all()
