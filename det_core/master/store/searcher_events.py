"""Record of the searches: the events that each received, and its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.master.store._rows import many
from det_core.master.store._schema import SEARCHER_EVENTS


@dataclass(frozen=True)
class SearcherEventRow:
    """An event and the decisions on it; None: the search has not answered yet."""

    experiment_id: int
    ordinal: int
    event: dict[str, Any]
    actions: list[dict[str, Any]] | None
    time: float


def add(
    session: Session, experiment_id: int, event: Mapping[str, Any], actions: Sequence[Mapping[str, Any]] | None
) -> int:
    """Record an event and the decisions taken; returns its ordinal, which counts from 0 in each experiment."""
    ordinal = count(session, experiment_id)
    values = {
        "experiment_id": experiment_id,
        "ordinal": ordinal,
        "event": dict(event),
        "actions": None if actions is None else [dict(action) for action in actions],
        "time": _clock.now(),
    }
    session.execute(SEARCHER_EVENTS.insert().values(values))
    return ordinal


def decide(session: Session, experiment_id: int, ordinal: int, actions: Sequence[Mapping[str, Any]]) -> None:
    """Record the decisions on an event that was recorded without."""
    row = (SEARCHER_EVENTS.c.experiment_id == experiment_id) & (SEARCHER_EVENTS.c.ordinal == ordinal)
    session.execute(update(SEARCHER_EVENTS).where(row).values(actions=[dict(action) for action in actions]))


def count(session: Session, experiment_id: int) -> int:
    """How many events were recorded."""
    table = SEARCHER_EVENTS
    last = session.execute(select(func.max(table.c.ordinal)).where(table.c.experiment_id == experiment_id)).scalar()
    return 0 if last is None else int(last) + 1


def after(
    session: Session, experiment_id: int, ordinal: int = -1, *, limit: int | None = None
) -> list[SearcherEventRow]:
    """The events after ``ordinal``, in order: all of them, or the first ``limit``."""
    where = (SEARCHER_EVENTS.c.experiment_id == experiment_id) & (SEARCHER_EVENTS.c.ordinal > ordinal)
    statement = select(SEARCHER_EVENTS).where(where).order_by(SEARCHER_EVENTS.c.ordinal).limit(limit)
    return many(session, statement, SearcherEventRow)


def erase(session: Session, experiment_id: int) -> None:
    """Forget what a search was told and decided, so that it begins anew."""
    session.execute(delete(SEARCHER_EVENTS).where(SEARCHER_EVENTS.c.experiment_id == experiment_id))
