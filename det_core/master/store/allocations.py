"""Allocations: the runs of a trial, each with its slots and its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.master.store._rows import many, one
from det_core.master.store._schema import ALLOCATIONS, TRIALS

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class AllocationRow:
    """One run of a trial.

    Attributes:
        id: ``{task id}.{run number}``.
        run_id: the run's number, ``trial_run_id`` on the wire.
        state: the caller's word, such as STARTING, RUNNING, ENDED.
        steps_completed: what it was handed as the step of ``latest_checkpoint``.
        ready: its script has asked for something, so that it can be preempted.
        preempt_time: when it was told to stop; None if it was not.
        acked: it has said that it noticed, or that it stops of its own accord.
        kill_time: when it was killed by the master; None if it was not.
        exit_kind: how its end was classified (§13.3).
        exit_status: its exit status; None where a signal ended it or nothing is known.
        facts: how it was launched: digest of its claim code, claims, name that the engine has for it.
        end_time: when it ended; None while it has not.
    """

    id: str
    trial_id: int
    run_id: int
    state: str
    slots: int
    slot_ids: list[int]
    steps_completed: int
    latest_checkpoint: str | None
    ready: bool
    preempt_time: float | None
    preempt_reason: str | None
    acked: bool
    kill_time: float | None
    kill_reason: str | None
    exit_kind: str | None
    exit_status: int | None
    exit_signal: int | None
    exit_detail: str | None
    facts: dict[str, Any]
    create_time: float
    start_time: float | None
    end_time: float | None


class AllocationChange(TypedDict, total=False):
    """What of an allocation can change."""

    state: str
    slot_ids: list[int]
    ready: bool
    preempt_time: float | None
    preempt_reason: str | None
    acked: bool
    kill_time: float | None
    kill_reason: str | None
    exit_kind: str | None
    exit_status: int | None
    exit_signal: int | None
    exit_detail: str | None
    facts: dict[str, Any]
    start_time: float | None
    end_time: float | None


def create(
    session: Session,
    allocation_id: str,
    trial_id: int,
    run_id: int,
    *,
    state: str,
    slots: int = 0,
    slot_ids: Sequence[int] = (),
    steps_completed: int = 0,
    latest_checkpoint: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> AllocationRow:
    """A new allocation; the trial's ``run_id`` becomes its number."""
    values = {
        "id": allocation_id,
        "trial_id": trial_id,
        "run_id": run_id,
        "state": state,
        "slots": slots,
        "slot_ids": list(slot_ids),
        "steps_completed": steps_completed,
        "latest_checkpoint": latest_checkpoint,
        "ready": False,
        "acked": False,
        "facts": dict(facts or {}),
        "create_time": _clock.now(),
    }
    session.execute(ALLOCATIONS.insert().values(values))
    session.execute(update(TRIALS).where(TRIALS.c.id == trial_id).values(run_id=run_id))
    found = get(session, allocation_id)
    assert found is not None
    return found


def get(session: Session, allocation_id: str) -> AllocationRow | None:
    """One allocation."""
    return one(session, select(ALLOCATIONS).where(ALLOCATIONS.c.id == allocation_id), AllocationRow)


def of_experiment(session: Session, experiment_id: int) -> list[AllocationRow]:
    """All allocations of an experiment's trials."""
    trials = select(TRIALS.c.id).where(TRIALS.c.experiment_id == experiment_id)
    return many(session, select(ALLOCATIONS).where(ALLOCATIONS.c.trial_id.in_(trials.scalar_subquery())), AllocationRow)


def of_run(session: Session, trial_id: int, run_id: int) -> AllocationRow | None:
    """The allocation of a trial's run."""
    where = (ALLOCATIONS.c.trial_id == trial_id) & (ALLOCATIONS.c.run_id == run_id)
    return one(session, select(ALLOCATIONS).where(where), AllocationRow)


def ends(session: Session, trial_id: int) -> list[tuple[str, str | None]]:
    """How the allocations of a trial that have ended did so, oldest first, each with the checkpoint it started from."""
    table = ALLOCATIONS.c
    statement = select(table.exit_kind, table.latest_checkpoint).where(
        (table.trial_id == trial_id) & table.exit_kind.is_not(None)
    )
    return [(kind, start) for kind, start in session.execute(statement.order_by(table.run_id))]


def alive(session: Session) -> list[AllocationRow]:
    """All allocations that have not ended, oldest first."""
    statement = select(ALLOCATIONS).where(ALLOCATIONS.c.end_time.is_(None))
    return many(session, statement.order_by(ALLOCATIONS.c.create_time, ALLOCATIONS.c.id), AllocationRow)


def change(session: Session, allocation_id: str, **values: Unpack[AllocationChange]) -> None:
    """Change what is given."""
    session.execute(update(ALLOCATIONS).where(ALLOCATIONS.c.id == allocation_id).values(**values))
