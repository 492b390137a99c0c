"""Checkpoints (§5.7): what is known of them; their files are in a storage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, bindparam, func, select, update
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.errors import StoreConflict
from det_core.master.store._rows import insert_new, is_id, many, one
from det_core.master.store._schema import CHECKPOINTS
from det_core.master.store.models import dumps

COMPLETED, PARTIALLY_DELETED, DELETED = "COMPLETED", "PARTIALLY_DELETED", "DELETED"
ADDED = "metadata.json"
"""File that a deletion may leave behind in addition; that is not a change."""


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint. ``resources`` maps each path to its bytes, ``size`` is their sum; ``reported`` tells repeats."""

    uuid: str
    experiment_id: int
    trial_id: int
    task_id: str
    allocation_id: str | None
    storage_id: int | None
    state: str
    metadata: dict[str, Any]
    resources: dict[str, int]
    size: int
    steps_completed: int
    report_time: float
    reported: str


def register(
    session: Session,
    uuid: str,
    *,
    experiment_id: int,
    trial_id: int,
    task_id: str,
    steps_completed: int,
    metadata: Mapping[str, Any],
    resources: Mapping[str, int],
    allocation_id: str | None = None,
    storage_id: int | None = None,
    report_time: float | None = None,
) -> bool:
    """Note a checkpoint that is complete in its storage.

    Returns:
        Whether it is news: False for a repeat, whatever has become of the checkpoint since.

    Raises:
        StoreConflict: another one has that uuid.
    """
    said = dumps([trial_id, dict(sorted(metadata.items())), dict(sorted(resources.items()))])
    row = CheckpointRow(
        uuid=uuid,
        experiment_id=experiment_id,
        trial_id=trial_id,
        task_id=task_id,
        allocation_id=allocation_id,
        storage_id=storage_id,
        state=COMPLETED,
        metadata=dict(metadata),
        resources=dict(resources),
        size=sum(resources.values()),
        steps_completed=steps_completed,
        report_time=_clock.now() if report_time is None else report_time,
        reported=hashlib.sha256(said.encode()).hexdigest(),
    )
    if insert_new(session, CHECKPOINTS, vars(row)):
        return True
    standing = get(session, uuid)
    if standing is None or standing.reported != row.reported:
        raise StoreConflict(f"checkpoint {uuid} was reported before with other files, metadata or trial")
    return False


def get(session: Session, uuid: str) -> CheckpointRow | None:
    """One checkpoint, deleted or not."""
    return one(session, select(CHECKPOINTS).where(CHECKPOINTS.c.uuid == uuid), CheckpointRow)


def of_trial(session: Session, trial_id: int, *, states: Sequence[str] = ()) -> list[CheckpointRow]:
    """The checkpoints of a trial, newest first, in one of ``states`` if any are given."""
    return _newest(session, CHECKPOINTS.c.trial_id == trial_id, states) if is_id(trial_id) else []


def of_experiment(session: Session, experiment_id: int, *, states: Sequence[str] = ()) -> list[CheckpointRow]:
    """The checkpoints of an experiment, newest first, in one of ``states`` if any are given."""
    return _newest(session, CHECKPOINTS.c.experiment_id == experiment_id, states) if is_id(experiment_id) else []


def page(
    session: Session, limit: int, offset: int, *, experiment_id: int | None = None, trial_id: int | None = None
) -> tuple[list[CheckpointRow], int]:
    """Return some checkpoints of an experiment or a trial, newest first, and how many it has."""
    where = CHECKPOINTS.c.trial_id == trial_id
    if experiment_id is not None:
        where = CHECKPOINTS.c.experiment_id == experiment_id
    total = session.execute(select(func.count()).select_from(CHECKPOINTS).where(where)).scalar_one()
    order = (CHECKPOINTS.c.report_time.desc(), CHECKPOINTS.c.uuid)
    statement = select(CHECKPOINTS).where(where).order_by(*order).limit(limit).offset(offset)
    return many(session, statement, CheckpointRow), total


def latest(session: Session, trial_id: int) -> CheckpointRow | None:
    """What the trial's next run starts from (§13.6): the complete one of the most steps, the newer one of equals."""
    table = CHECKPOINTS
    statement = select(table).where((table.c.trial_id == trial_id) & (table.c.state == COMPLETED))
    order = (table.c.steps_completed.desc(), table.c.report_time.desc(), table.c.uuid)
    return one(session, statement.order_by(*order).limit(1), CheckpointRow)


def latest_of_trials(session: Session, trial_ids: Sequence[int]) -> dict[int, str]:
    """Return the UUID of the :func:`latest` checkpoint of each of some trials that has one."""
    return {trial: uuid for trial, uuid in session.execute(_LATEST_OF_TRIALS, {"trials": list(trial_ids)})}


def _latest_of_trials_statement() -> Select[Any]:
    """Return the statement of the latest checkpoints of some trials."""
    table = CHECKPOINTS.c
    order = (table.steps_completed.desc(), table.report_time.desc(), table.uuid)
    place = func.row_number().over(partition_by=table.trial_id, order_by=order).label("place")
    chosen = table.trial_id.in_(bindparam("trials", expanding=True)) & (table.state == COMPLETED)
    ranked = select(table.trial_id, table.uuid, place).where(chosen).subquery().c
    return select(ranked.trial_id, ranked.uuid).where(ranked.place == 1)


# Built once: SQLAlchemy takes longer to build it than the database to answer.
_LATEST_OF_TRIALS = _latest_of_trials_statement()


def set_resources(session: Session, uuid: str, remaining: Mapping[str, int]) -> CheckpointRow | None:
    """Note what a deletion has left: nothing is DELETED, less than before PARTIALLY_DELETED. None: unknown."""
    row = get(session, uuid)
    if row is None or row.state == DELETED:
        return row
    left = dict(remaining)
    compared = left if ADDED in row.resources else {path: size for path, size in left.items() if path != ADDED}
    if left and compared == row.resources:
        return row
    values = {
        "resources": left,
        "size": sum(left.values()),
        "state": PARTIALLY_DELETED if left else DELETED,
    }
    session.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.uuid == uuid).values(values))
    return get(session, uuid)


def set_metadata(session: Session, uuid: str, metadata: Mapping[str, Any]) -> None:
    """Replace what the master answers as a checkpoint's metadata."""
    session.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.uuid == uuid).values(metadata=dict(metadata)))


def _newest(session: Session, where: Any, states: Sequence[str]) -> list[CheckpointRow]:
    statement = select(CHECKPOINTS).where(where)
    if states:
        statement = statement.where(CHECKPOINTS.c.state.in_(states))
    return many(session, statement.order_by(CHECKPOINTS.c.report_time.desc(), CHECKPOINTS.c.uuid), CheckpointRow)
