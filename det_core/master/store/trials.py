"""Trials, and the metadata that their scripts set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.master.store._rows import is_id, many, one, put
from det_core.master.store._schema import RUN_METADATA, TRIALS

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class TrialRow:
    """A trial.

    Attributes:
        request_id: what the search calls it.
        run_id: the number of its newest run; 0 before the first.
        closed: the search gives it no more operations.
        reopened: it goes on after its search has seen its end.
        validated: the largest step whose validation the search was told; -1: none.
        early_exit: the reason that its script has given for giving up.
        status: what its script says it is doing.
        warm_start: the checkpoint it begins from when it has none of its own.
        last_activity: an unmanaged trial's last sign of life.
        steps, latest_step, best_step, best: what ``validations`` keeps of its reports.
    """

    id: int
    experiment_id: int
    request_id: str
    task_id: str
    external_id: str | None
    state: str
    hparams: dict[str, Any]
    seed: int
    run_id: int
    restarts: int
    closed: bool
    reopened: bool
    validated: int
    early_exit: str | None
    status: str
    progress: float
    warm_start: str | None
    unmanaged: bool
    error: str | None
    last_activity: float | None
    start_time: float
    end_time: float | None
    steps: int
    latest_step: int | None
    best_step: int | None
    best: float | None


class TrialChange(TypedDict, total=False):
    """What of a trial can change."""

    state: str
    hparams: dict[str, Any]
    run_id: int
    restarts: int
    closed: bool
    reopened: bool
    validated: int
    early_exit: str | None
    status: str
    progress: float
    warm_start: str | None
    error: str | None
    last_activity: float | None
    start_time: float
    end_time: float | None


def create(
    session: Session,
    experiment_id: int,
    request_id: str,
    *,
    state: str,
    hparams: Mapping[str, Any],
    seed: int = 0,
    external_id: str | None = None,
    task_id: str | None = None,
    warm_start: str | None = None,
    unmanaged: bool = False,
    last_activity: float | None = None,
    trial_id: int | None = None,
) -> TrialRow:
    """The trial of that request id: a new one, or the one that stands. ``trial_id``: None takes the next."""
    standing = by_request_id(session, experiment_id, request_id)
    if standing is not None:
        return standing
    values = {
        **({} if trial_id is None else {"id": trial_id}),
        "experiment_id": experiment_id,
        "request_id": request_id,
        "task_id": f"{experiment_id}.{request_id}" if task_id is None else task_id,
        "external_id": external_id,
        "state": state,
        "hparams": dict(hparams),
        "seed": seed,
        "run_id": 0,
        "restarts": 0,
        "closed": False,
        "reopened": False,
        "validated": -1,
        "status": "",
        "progress": 0.0,
        "warm_start": warm_start,
        "unmanaged": unmanaged,
        "last_activity": last_activity,
        "start_time": _clock.now(),
    }
    (number,) = session.connection().execute(TRIALS.insert().values(values)).inserted_primary_key or (0,)
    found = get(session, number)
    assert found is not None
    return found


def get(session: Session, trial_id: int) -> TrialRow | None:
    """One trial."""
    return one(session, select(TRIALS).where(TRIALS.c.id == trial_id), TrialRow) if is_id(trial_id) else None


def last_id(session: Session) -> int:
    """The largest id that a trial was given; 0 if there is none."""
    return int(session.execute(select(func.max(TRIALS.c.id))).scalar() or 0)


def by_request_id(session: Session, experiment_id: int, request_id: str) -> TrialRow | None:
    """The trial that the search of an experiment calls so."""
    where = (TRIALS.c.experiment_id == experiment_id) & (TRIALS.c.request_id == request_id)
    return one(session, select(TRIALS).where(where), TrialRow)


def by_task_id(session: Session, task_id: str) -> TrialRow | None:
    """The trial of a task."""
    return one(session, select(TRIALS).where(TRIALS.c.task_id == task_id), TrialRow)


def of_experiment(session: Session, experiment_id: int, *, states: Sequence[str] = ()) -> list[TrialRow]:
    """The trials of an experiment by id, in one of ``states`` if any are given."""
    if not is_id(experiment_id):
        return []
    statement = select(TRIALS).where(TRIALS.c.experiment_id == experiment_id).order_by(TRIALS.c.id)
    return many(session, statement.where(TRIALS.c.state.in_(states)) if states else statement, TrialRow)


def page(
    session: Session,
    experiment_id: int,
    chosen: ColumnElement[bool],
    order: Sequence[ColumnElement[Any]],
    *,
    limit: int | None,
    offset: int,
) -> list[TrialRow]:
    """Return some trials of an experiment.

    Args:
        session: Session that reads.
        experiment_id: Experiment.
        chosen: Condition on its trials.
        order: Order of its trials.
        limit: Maximum number, or None.
        offset: Trials to skip.
    """
    statement = select(TRIALS).where(TRIALS.c.experiment_id == experiment_id, chosen)
    return many(session, statement.order_by(*order).limit(limit).offset(offset), TrialRow)


def count(session: Session, experiment_id: int, chosen: ColumnElement[bool]) -> int:
    """Return the number of an experiment's trials that meet a condition."""
    statement = select(func.count()).select_from(TRIALS).where(TRIALS.c.experiment_id == experiment_id, chosen)
    return int(session.execute(statement).scalar_one())


def ends_by_state(session: Session, experiment_id: int) -> dict[str, float | None]:
    """Return the states of an experiment's trials, each with the last end of those in it."""
    statement = select(TRIALS.c.state, func.max(TRIALS.c.end_time)).where(TRIALS.c.experiment_id == experiment_id)
    return {state: end for state, end in session.execute(statement.group_by(TRIALS.c.state))}


def in_states(session: Session, states: Sequence[str], *, unmanaged: bool | None = None) -> list[TrialRow]:
    """The trials of all experiments that are in one of ``states``, by id."""
    statement = select(TRIALS).where(TRIALS.c.state.in_(states)).order_by(TRIALS.c.id)
    if unmanaged is not None:
        statement = statement.where(TRIALS.c.unmanaged == unmanaged)
    return many(session, statement, TrialRow)


def warm_starts(session: Session, *, without: int) -> set[str]:
    """The checkpoints that trials start from, save those of the experiment ``without``."""
    where = TRIALS.c.warm_start.is_not(None) & (TRIALS.c.experiment_id != without)
    return set(session.execute(select(TRIALS.c.warm_start).where(where).distinct()).scalars())


def change(session: Session, trial_id: int, **values: Unpack[TrialChange]) -> None:
    """Change what is given."""
    session.execute(update(TRIALS).where(TRIALS.c.id == trial_id).values(**values))


def set_metadata(session: Session, trial_id: int, metadata: Mapping[str, Any]) -> None:
    """Replace a trial's metadata (§5.4); its limits are the caller's to check."""
    put(session, RUN_METADATA, {"trial_id": trial_id, "metadata": dict(metadata), "time": _clock.now()})


def metadata(session: Session, trial_id: int) -> dict[str, Any]:
    """A trial's metadata; {} if none was set."""
    if not is_id(trial_id):
        return {}
    found = session.execute(select(RUN_METADATA.c.metadata).where(RUN_METADATA.c.trial_id == trial_id)).scalar()
    return dict(found or {})
