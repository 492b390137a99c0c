"""Checkpoints (§5.7): what the master knows of them; their files are in a storage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, func, select
from sqlalchemy.orm import Session

from det_core.errors import StoreConflict
from det_core.master.store.models import Checkpoint, dumps

COMPLETED = "COMPLETED"
PARTIALLY_DELETED = "PARTIALLY_DELETED"
DELETED = "DELETED"
METADATA_FILE = "metadata.json"
"""File that a deletion may leave in addition; it does not count as a change."""
_C = Checkpoint.__table__.c
_NEWEST_FIRST = (Checkpoint.report_time.desc(), Checkpoint.uuid)
_MOST_STEPS_FIRST = (_C.steps_completed.desc(), _C.report_time.desc(), _C.uuid)


def _latest_of_trials_statement() -> Select[Any]:
    """Return the statement of the latest checkpoints of some trials."""
    place = func.row_number().over(partition_by=_C.trial_id, order_by=_MOST_STEPS_FIRST).label("place")
    chosen = _C.trial_id.in_(bindparam("trials", expanding=True)) & (_C.state == COMPLETED)
    ranked = select(_C.trial_id, _C.uuid, place).where(chosen).subquery().c
    return select(ranked.trial_id, ranked.uuid).where(ranked.place == 1)


# Built once: SQLAlchemy takes longer to build it than the database to answer.
_LATEST_OF_TRIALS = _latest_of_trials_statement()


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
    report_time: float,
) -> bool:
    """Store a checkpoint that is complete in its storage.

    Returns:
        Whether it is new: False for a repeat, even if the checkpoint has changed since.

    Raises:
        StoreConflict: If another checkpoint has that UUID.
    """
    said = dumps([trial_id, dict(sorted(metadata.items())), dict(sorted(resources.items()))])
    reported = hashlib.sha256(said.encode()).hexdigest()
    stored = session.get(Checkpoint, uuid)
    if stored is not None:
        if stored.reported != reported:
            raise StoreConflict(f"checkpoint {uuid} was reported before with other files, metadata or trial")
        return False
    session.add(
        Checkpoint(
            uuid=uuid,
            experiment_id=experiment_id,
            trial_id=trial_id,
            task_id=task_id,
            allocation_id=allocation_id,
            storage_id=storage_id,
            state=COMPLETED,
            user_metadata=dict(metadata),
            resources=dict(resources),
            size=sum(resources.values()),
            steps_completed=steps_completed,
            report_time=report_time,
            reported=reported,
        )
    )
    return True


def of_experiment(session: Session, experiment_id: int, *, states: Sequence[str] = ()) -> Sequence[Checkpoint]:
    """Return the checkpoints of an experiment, newest first, in one of ``states`` if any are given."""
    statement = select(Checkpoint).where(Checkpoint.experiment_id == experiment_id).order_by(*_NEWEST_FIRST)
    if states:
        statement = statement.where(Checkpoint.state.in_(states))
    return session.scalars(statement).all()


def page(session: Session, chosen: ColumnElement[bool], limit: int, offset: int) -> tuple[Sequence[Checkpoint], int]:
    """Return some checkpoints that meet a condition, newest first, and how many do."""
    total = session.scalars(select(func.count()).select_from(Checkpoint).where(chosen)).one()
    statement = select(Checkpoint).where(chosen).order_by(*_NEWEST_FIRST)
    return session.scalars(statement.limit(limit).offset(offset)).all(), total


def latest(session: Session, trial_id: int) -> Checkpoint | None:
    """Return the checkpoint that the next run of a trial starts from, or None.

    It is the complete one of the most steps, the newer one of equals (§13.6).
    """
    statement = select(Checkpoint).where(Checkpoint.trial_id == trial_id, Checkpoint.state == COMPLETED)
    return session.scalars(statement.order_by(*_MOST_STEPS_FIRST).limit(1)).one_or_none()


def latest_of_trials(session: Session, trial_ids: Sequence[int]) -> dict[int, str]:
    """Return the UUID of the :func:`latest` checkpoint of each of some trials that has one."""
    rows = session.connection().execute(_LATEST_OF_TRIALS, {"trials": list(trial_ids)})
    return {trial: uuid for trial, uuid in rows}


def set_resources(session: Session, uuid: str, remaining: Mapping[str, int]) -> None:
    """Store the files that a deletion has left: without any the checkpoint is deleted, with fewer it is so in part."""
    row = session.get(Checkpoint, uuid)
    if row is None or row.state == DELETED:
        return
    left = dict(remaining)
    if METADATA_FILE not in row.resources:
        compared = {path: size for path, size in left.items() if path != METADATA_FILE}
    else:
        compared = left
    if not left or compared != row.resources:
        row.resources = left
        row.size = sum(left.values())
        row.state = PARTIALLY_DELETED if left else DELETED
