"""Record of the searches: the events that each received, and its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, delete, func, select
from sqlalchemy.orm import Session

from det_core.master.store._rows import change
from det_core.master.store.models import SearcherEvent


def add(
    session: Session, experiment_id: int, event: Mapping[str, Any], actions: Sequence[Mapping[str, Any]] | None
) -> None:
    """Record an event and the decisions taken on it."""
    row = SearcherEvent(
        experiment_id=experiment_id,
        ordinal=count(session, experiment_id),
        event=dict(event),
        actions=None if actions is None else [dict(action) for action in actions],
    )
    session.add(row)


def decide(session: Session, experiment_id: int, ordinal: int, actions: Sequence[Mapping[str, Any]]) -> None:
    """Record the decisions on an event that was recorded without."""
    change(session, SearcherEvent, (experiment_id, ordinal), actions=[dict(action) for action in actions])


def count(session: Session, experiment_id: int) -> int:
    """Return the number of events that were recorded."""
    last = func.coalesce(func.max(SearcherEvent.ordinal), -1)
    return session.scalars(select(last).where(SearcherEvent.experiment_id == experiment_id)).one() + 1


def after(session: Session, experiment_id: int, ordinal: int = -1, *, limit: int | None = None) -> Sequence[Row[Any]]:
    """Return ordinal, event and actions of the events after an ordinal, in order: all of them, or the first ``limit``.

    They are not objects of the session: a search of 10,000 trials would take three times as long to read.
    """
    columns = (SearcherEvent.ordinal, SearcherEvent.event, SearcherEvent.actions)
    chosen = (SearcherEvent.experiment_id == experiment_id) & (SearcherEvent.ordinal > ordinal)
    return session.execute(select(*columns).where(chosen).order_by(SearcherEvent.ordinal).limit(limit)).all()


def erase(session: Session, experiment_id: int) -> None:
    """Delete the events of a search, so that it begins anew."""
    session.execute(delete(SearcherEvent).where(SearcherEvent.experiment_id == experiment_id))
