"""Experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.master.store import _schema as reports
from det_core.master.store._rows import is_id, many, one
from det_core.master.store._schema import (
    ALLOCATIONS,
    EXPERIMENTS,
    OPERATIONS,
    RUN_METADATA,
    SEARCHER_EVENTS,
    TOKENS,
    TRIALS,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class ExperimentRow:
    """An experiment. Times are seconds since the epoch; ``context`` is the digest of its archive."""

    id: int
    state: str
    name: str
    description: str
    labels: list[str]
    config: dict[str, Any]
    original_config: str
    warnings: list[str]
    context: str | None
    seed: int
    priority: int
    progress: float
    archived: bool
    unmanaged: bool
    parent_id: int | None
    external_id: str | None
    error: str | None
    start_time: float
    end_time: float | None


class ExperimentChange(TypedDict, total=False):
    """What of an experiment can change."""

    state: str
    name: str
    description: str
    labels: list[str]
    config: dict[str, Any]
    warnings: list[str]
    priority: int
    progress: float
    archived: bool
    error: str | None
    start_time: float
    end_time: float | None


def create(
    session: Session,
    *,
    state: str,
    name: str,
    config: dict[str, Any],
    original_config: str = "",
    description: str = "",
    labels: Sequence[str] = (),
    warnings: Sequence[str] = (),
    context: str | None = None,
    seed: int = 0,
    priority: int = 42,
    unmanaged: bool = False,
    parent_id: int | None = None,
    external_id: str | None = None,
    experiment_id: int | None = None,
) -> ExperimentRow | None:
    """A new experiment; None if one of that external id stands. ``experiment_id``: None takes the next."""
    if external_id is not None and by_external_id(session, external_id) is not None:
        return None
    values = {
        **({} if experiment_id is None else {"id": experiment_id}),
        "state": state,
        "name": name,
        "description": description,
        "labels": list(labels),
        "config": config,
        "original_config": original_config,
        "warnings": list(warnings),
        "context": context,
        "seed": seed,
        "priority": priority,
        "progress": 0.0,
        "archived": False,
        "unmanaged": unmanaged,
        "parent_id": parent_id,
        "external_id": external_id,
        "start_time": _clock.now(),
    }
    (number,) = session.connection().execute(EXPERIMENTS.insert().values(values)).inserted_primary_key or (0,)
    found = get(session, number)
    assert found is not None
    return found


def get(session: Session, experiment_id: int) -> ExperimentRow | None:
    """One experiment, deleted or not; None if there never was one of that id."""
    if not is_id(experiment_id):
        return None
    return one(session, select(EXPERIMENTS).where(EXPERIMENTS.c.id == experiment_id), ExperimentRow)


def last_id(session: Session) -> int:
    """The largest id that an experiment was given; 0 if there is none."""
    return int(session.execute(select(func.max(EXPERIMENTS.c.id))).scalar() or 0)


def by_external_id(session: Session, external_id: str) -> ExperimentRow | None:
    """The experiment that a caller has given that name."""
    return one(session, select(EXPERIMENTS).where(EXPERIMENTS.c.external_id == external_id), ExperimentRow)


def find(
    session: Session,
    *,
    states: Sequence[str] = (),
    without: Sequence[str] = ("DELETED",),
    name: str | None = None,
    labels: Sequence[str] = (),
    archived: bool | None = None,
    newest_first: bool = False,
    by_start: bool = False,
    limit: int | None = None,
    offset: int = 0,
) -> tuple[list[ExperimentRow], int]:
    """Return experiments by ID, and how many match without ``limit`` and ``offset``.

    Args:
        session: where.
        states: only those in one of these; none: all.
        without: those in one of these are left out.
        name: only those whose name contains this, in whatever case.
        labels: only those that have all of these.
        archived: only those that are, or are not.
        newest_first: the largest id first.
        by_start: by when they started, and then by id.
        limit: at most so many.
        offset: how many to pass over before.
    """
    statement = select(EXPERIMENTS)
    if states:
        statement = statement.where(EXPERIMENTS.c.state.in_(states))
    if without:
        statement = statement.where(EXPERIMENTS.c.state.not_in(without))
    if name:
        statement = statement.where(func.lower(EXPERIMENTS.c.name).contains(name.lower(), autoescape=True))
    if archived is not None:
        statement = statement.where(EXPERIMENTS.c.archived == archived)
    keys = [EXPERIMENTS.c.start_time, EXPERIMENTS.c.id] if by_start else [EXPERIMENTS.c.id]
    statement = statement.order_by(*(key.desc() if newest_first else key for key in keys))
    if labels:
        # Labels are JSON: compared here, without the configurations of all those that do not match.
        pairs = session.execute(statement.with_only_columns(EXPERIMENTS.c.id, EXPERIMENTS.c.labels))
        matching = [number for number, own in pairs if set(labels) <= set(own)]
        statement = statement.where(EXPERIMENTS.c.id.in_(matching))
    total = session.execute(select(func.count()).select_from(statement.order_by(None).subquery())).scalar_one()
    return many(session, statement.limit(limit).offset(offset), ExperimentRow), total


def change(session: Session, experiment_id: int, **values: Unpack[ExperimentChange]) -> None:
    """Change what is given."""
    session.execute(update(EXPERIMENTS).where(EXPERIMENTS.c.id == experiment_id).values(**values))


def trial_counts(session: Session, experiment_ids: Sequence[int] = ()) -> dict[int, int]:
    """Experiment -> how many trials it has, for those that have any; of all, if none are given."""
    statement = select(TRIALS.c.experiment_id, func.count()).group_by(TRIALS.c.experiment_id)
    if experiment_ids:
        statement = statement.where(TRIALS.c.experiment_id.in_(experiment_ids))
    return {experiment: count for experiment, count in session.execute(statement)}


def erase(session: Session, experiment_id: int) -> None:
    """Delete all that belongs to an experiment but its own row and those of its trials and checkpoints."""
    trials = select(TRIALS.c.id).where(TRIALS.c.experiment_id == experiment_id).scalar_subquery()
    tasks = select(TRIALS.c.task_id).where(TRIALS.c.experiment_id == experiment_id).scalar_subquery()
    allocations = select(ALLOCATIONS.c.id).where(ALLOCATIONS.c.trial_id.in_(trials)).scalar_subquery()
    session.execute(delete(TOKENS).where(TOKENS.c.allocation_id.in_(allocations)))
    session.execute(delete(reports.LOGS).where(reports.LOGS.c.task_id.in_(tasks)))
    for table in (reports.METRICS, reports.METADATA.tables["writers"], reports.RECORDS):
        session.execute(delete(table).where(table.c.trial_id.in_(trials)))
    for table in (OPERATIONS, ALLOCATIONS, RUN_METADATA):
        session.execute(delete(table).where(table.c.trial_id.in_(trials)))
    session.execute(delete(SEARCHER_EVENTS).where(SEARCHER_EVENTS.c.experiment_id == experiment_id))
