"""Records of trials, made of rows and live state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, and_, or_, select, true

from det_core.config import Experiment
from det_core.master.scheduler import Phase, State
from det_core.master.store import METADATA, checkpoints, models, trials, validations
from det_core.protocol.records import TrialView, ValidationView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

    from det_core.master.service._live import LiveExperiment, LiveTrial
    from det_core.master.store.series import MetricRow

SHOWN_AT_ONCE = 500
"""Trials whose operations, checkpoints and validations are looked up by one statement each."""
_T = METADATA.tables["trials"].c


@dataclass(frozen=True)
class Snapshot:
    """State of a trial in memory, copied on the loop: readers have threads of their own.

    Attributes:
        phase: State that it shows while its row says ACTIVE.
        allocation_id: Allocation that it runs in, or None.
        stop_by: Time at which that is killed, or None.
        parked: Whether it waits for the search.
    """

    phase: str
    allocation_id: str | None
    stop_by: float | None
    parked: bool


@dataclass(frozen=True)
class _Stored:
    """Operations, checkpoints and validations of some trials, by trial."""

    operations: dict[int, models.Operation]
    checkpoints: dict[int, str]
    latest: dict[int, MetricRow]
    best: dict[int, MetricRow]


def snapshots(experiment: LiveExperiment | None) -> dict[int, Snapshot]:
    """Return snapshots of the trials of an experiment; none if it has ended. Call it on the loop."""
    if experiment is None:
        return {}
    return {trial.id: snapshot(trial) for trial in experiment.trials.values()}


def snapshot(trial: LiveTrial) -> Snapshot:
    """Return a snapshot of a trial. Call it on the loop."""
    allocation = trial.allocation
    if allocation is not None:
        return Snapshot(allocation.phase.value, allocation.id, allocation.stop_by, parked=False)
    if trial.pending:
        return Snapshot(Phase.QUEUED.value, None, None, parked=False)
    return Snapshot(State.ACTIVE.value, None, None, parked=not trial.closed)


def in_states(states: Sequence[str], live: Mapping[int, Snapshot]) -> ColumnElement[bool]:
    """Return the condition that a trial is shown in one of ``states``; with none given, that it is any."""
    if not states:
        return true()
    active = _T.state == State.ACTIVE.value
    managed = and_(active, ~_T.unmanaged)
    conditions = [
        _T.state.in_([state for state in states if state != State.ACTIVE]),
        and_(managed, _T.id.in_([number for number, trial in live.items() if trial.phase in states])),
    ]
    if State.ACTIVE in states:
        conditions += [and_(managed, _T.id.not_in(list(live))), and_(active, _T.unmanaged, _T.run_id == 0)]
    if Phase.RUNNING.value in states:
        conditions.append(and_(active, _T.unmanaged, _T.run_id > 0))
    return or_(*conditions)


def show(
    session: Session, experiment: models.Experiment, rows: Sequence[models.Trial], live: Mapping[int, Snapshot]
) -> Iterator[TrialView]:
    """Yield trials of an experiment as they are shown in lists."""
    spec = Experiment(experiment.config)
    for start in range(0, len(rows), SHOWN_AT_ONCE):
        chunk = rows[start : start + SHOWN_AT_ONCE]
        latest, best = validations.latest_and_best(session, [row.id for row in chunk if row.latest_step is not None])
        managed = [row.id for row in chunk if not row.unmanaged]
        stored = _Stored(
            operations=trials.current_operations(session, models.Trial.id.in_(managed)) if managed else {},
            checkpoints=checkpoints.latest_of_trials(session, [row.id for row in chunk]),
            latest=latest,
            best=best,
        )
        for row in chunk:
            yield _view(row, spec, stored, live.get(row.id))


def show_one(session: Session, experiment: models.Experiment, row: models.Trial, live: Snapshot | None) -> TrialView:
    """Return one trial, with how its last run ended."""
    snapshots = {} if live is None else {row.id: live}
    (view,) = show(session, experiment, [row], snapshots)
    return replace(view, exit_status=_exit_status(session, row))


def _exit_status(session: Session, row: models.Trial) -> int | None:
    """Return how the last run of a trial ended, as a shell's exit status."""
    if row.unmanaged:
        return None
    of_run = (models.Allocation.trial_id == row.id) & (models.Allocation.run_id == row.run_id)
    run = session.scalar(select(models.Allocation).where(of_run))
    if run is None:
        return None
    if run.exit_signal is not None:
        return 128 + run.exit_signal
    return run.exit_status


def _view(row: models.Trial, spec: Experiment, stored: _Stored, live: Snapshot | None) -> TrialView:
    operation = stored.operations.get(row.id)
    return TrialView(
        id=row.id,
        experiment_id=row.experiment_id,
        request_id=row.request_id,
        task_id=row.task_id,
        external_id=row.external_id,
        state=_state(row, live),
        status=row.status,
        hparams=row.hparams,
        seed=row.seed,
        restarts=row.restarts,
        restarted=min(row.restarts, spec.max_restarts),
        trial_run_id=row.run_id,
        allocation_id=None if live is None else live.allocation_id,
        stop_by_time=None if live is None else live.stop_by,
        parked=live is not None and live.parked,
        progress=_progress(row, spec, operation),
        total_batches=row.steps,
        operation_length=None if operation is None else operation.length,
        operation_completed=operation is not None and operation.completed,
        latest_checkpoint=stored.checkpoints.get(row.id),
        latest_validation=_validation(stored.latest.get(row.id), spec),
        best_validation=_validation(stored.best.get(row.id), spec),
        start_time=row.start_time,
        end_time=row.end_time,
        error=row.error,
    )


def _progress(row: models.Trial, spec: Experiment, operation: models.Operation | None) -> float:
    """Return the fraction done: as reported, or the steps reported of all that may come to be trained."""
    if row.state == State.COMPLETED:
        return 1.0
    whole = spec.max_units
    if whole is None and operation is not None:
        whole = operation.length
    if not whole or row.steps > whole or spec.unit not in (None, "batches"):
        return row.progress  # its steps are of another kind
    return max(row.progress, row.steps / whole)


def _validation(row: MetricRow | None, spec: Experiment) -> ValidationView | None:
    if row is None:
        return None
    return ValidationView(
        total_batches=row.steps_completed or 0,
        metrics=row.metrics,
        metric=validations.number(row.metrics, spec.metric),
        end_time=row.time,
        trial_run_id=row.run_id,
    )


def _state(row: models.Trial, live: Snapshot | None) -> str:
    """Return the state; of an ACTIVE trial how far its allocation is."""
    if row.state != State.ACTIVE:
        return row.state
    if row.unmanaged and row.run_id:
        return Phase.RUNNING.value
    if live is not None:
        return live.phase
    return row.state
