"""Records of experiments and trials as they are shown, made of rows and of snapshots of the live state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, and_, func, or_, select, true

from det_core.config import Experiment
from det_core.master.scheduler import DEFAULT_PRIORITY, Phase, State
from det_core.master.service import _measured
from det_core.master.service._search_workers import SearchWorker
from det_core.master.store import METADATA, checkpoints, models, trials, validations
from det_core.protocol.records import ExperimentView, TrialView, ValidationView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

    from det_core.master.service._live import LiveExperiment, LiveTrial
    from det_core.master.service._state import ServiceState
    from det_core.master.store.series import MetricRow
    from det_core.master.store.validations import BestTrial

NO_METRIC = "unmanaged"
"""Metric in the configuration of an experiment that has none (§9)."""
SHOWN_AT_ONCE = 500
"""Trials whose operations, checkpoints and validations are looked up by one statement each."""
_T = METADATA.tables["trials"].c


@dataclass(frozen=True)
class ExperimentSnapshot:
    """State of an experiment in memory, copied on the loop: readers have threads of their own.

    Attributes:
        progress: Fraction of its search that is done; None without a search.
        stop_by: Times at which allocations that were asked to stop are killed.
        remarks: What there is to say of it.
    """

    progress: float | None
    stop_by: tuple[float, ...]
    remarks: tuple[str, ...]


def snapshot_experiments(service: ServiceState) -> dict[int, ExperimentSnapshot]:
    """Return snapshots of the experiments that have not ended. Call it on the loop."""
    return {number: _snapshot_experiment(experiment) for number, experiment in service.live.experiments.items()}


def snapshot_experiment(service: ServiceState, experiment_id: int) -> dict[int, ExperimentSnapshot]:
    """Return a snapshot of one experiment; none if it has ended. Call it on the loop."""
    live = service.live.experiments.get(experiment_id)
    if live is None:
        return {}
    return {experiment_id: _snapshot_experiment(live)}


def _snapshot_experiment(experiment: LiveExperiment) -> ExperimentSnapshot:
    allocations = [trial.allocation for trial in experiment.trials.values() if trial.allocation is not None]
    measured = experiment.measured
    remarks = []
    if measured.warning is not None and not measured.known:
        remarks.append(measured.warning)
    if isinstance(experiment.search, SearchWorker):
        remarks += experiment.search.remarks()
    return ExperimentSnapshot(
        progress=None if experiment.search is None else experiment.search.progress(),
        stop_by=tuple(end for end in (allocation.stop_by for allocation in allocations) if end is not None),
        remarks=tuple(remarks),
    )


def show_experiments(
    session: Session, service: ServiceState, rows: Sequence[models.Experiment], live: Mapping[int, ExperimentSnapshot]
) -> list[ExperimentView]:
    """Return experiments as they are shown."""
    trial = models.Trial
    counting = select(trial.experiment_id, func.count()).where(trial.experiment_id.in_([row.id for row in rows]))
    counts = {number: count for number, count in session.execute(counting.group_by(trial.experiment_id))}
    best = best_of(session, rows)
    return [
        _show_experiment(
            row,
            counts.get(row.id, 0),
            best.get(row.id),
            live.get(row.id),
            _remarks(session, service, row, live.get(row.id)),
        )
        for row in rows
    ]


def _remarks(
    session: Session, service: ServiceState, row: models.Experiment, live: ExperimentSnapshot | None
) -> list[str]:
    """Return what there is to say of an experiment; of one that has ended it is found out once."""
    if live is not None:
        return list(live.remarks)
    if row.unmanaged or row.end_time is None:
        return []
    known = service.remarks.get(row.id)
    if known is None or known[0] != row.end_time:
        known = service.remarks[row.id] = (row.end_time, _measured.remarks(session, row))
    return known[1]


def best_of(session: Session, rows: Sequence[models.Experiment]) -> dict[int, BestTrial]:
    """Return the best trial of each experiment with a validation; of equals the earliest."""
    best: dict[int, BestTrial] = {}
    for smaller_is_better in (True, False):
        ids = [row.id for row in rows if Experiment(row.config).smaller_is_better == smaller_is_better]
        if ids:
            best |= validations.best_trials(session, ids, smaller_is_better=smaller_is_better)
    return best


def _show_experiment(
    row: models.Experiment, num_trials: int, best: BestTrial | None, live: ExperimentSnapshot | None, remarks: list[str]
) -> ExperimentView:
    spec = Experiment(row.config)
    stopping: tuple[float, ...] = ()
    progress = row.progress
    if live is not None:
        stopping = live.stop_by
        if live.progress is not None:
            progress = live.progress
    if row.state == State.COMPLETED:
        progress = 1.0
    return ExperimentView(
        id=row.id,
        name=row.name,
        description=row.description,
        state="RUNNING" if row.unmanaged and row.state == "ACTIVE" and num_trials else row.state,
        progress=progress,
        config=row.config,
        original_config=row.original_config,
        searcher_type=str(spec.searcher["name"]),
        searcher_metric="" if row.unmanaged and spec.metric == NO_METRIC else spec.metric,
        smaller_is_better=spec.smaller_is_better,
        num_trials=num_trials,
        stopping_trials=len(stopping),
        stop_by_time=max(stopping, default=None),
        priority=row.priority,
        unmanaged=row.unmanaged,
        parent_id=row.parent_id,
        external_id=row.external_id,
        start_time=row.start_time,
        end_time=row.end_time,
        best_trial_id=best and best.trial_id,
        best_metric=best and best.value,
        error=row.error,
        warnings=list(row.warnings),
        remarks=remarks,
    )


def drafted(spec: Experiment) -> ExperimentView:
    """Return an experiment that could be created, and was not."""
    return ExperimentView(
        id=0,
        name=spec.name,
        description=spec.description or "",
        state="PAUSED",
        config=spec.data,
        searcher_type=str(spec.searcher["name"]),
        searcher_metric=spec.metric,
        smaller_is_better=spec.smaller_is_better,
        priority=DEFAULT_PRIORITY if spec.priority is None else spec.priority,
        warnings=list(spec.warnings),
    )


@dataclass(frozen=True)
class TrialSnapshot:
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


NOT_LIVE = TrialSnapshot("", None, None, parked=False)
"""Snapshot of a trial that has ended, or whose experiment has."""


@dataclass(frozen=True)
class _Stored:
    """Operations, checkpoints and validations of some trials, by trial."""

    operations: dict[int, models.Operation]
    checkpoints: dict[int, str]
    latest: dict[int, MetricRow]
    best: dict[int, MetricRow]


def snapshot_trials(experiment: LiveExperiment | None) -> dict[int, TrialSnapshot]:
    """Return snapshots of the trials of an experiment; none if it has ended. Call it on the loop."""
    if experiment is None:
        return {}
    return {trial.id: snapshot_trial(trial) for trial in experiment.trials.values()}


def snapshot_trial(trial: LiveTrial) -> TrialSnapshot:
    """Return a snapshot of a trial. Call it on the loop."""
    allocation = trial.allocation
    if allocation is not None:
        return TrialSnapshot(allocation.phase.value, allocation.id, allocation.stop_by, parked=False)
    if trial.pending:
        return TrialSnapshot(Phase.QUEUED.value, None, None, parked=False)
    return TrialSnapshot(State.ACTIVE.value, None, None, parked=not trial.row.closed)


def in_states(states: Sequence[str], live: Mapping[int, TrialSnapshot]) -> ColumnElement[bool]:
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


def show_trials(
    session: Session, experiment: models.Experiment, rows: Sequence[models.Trial], live: Mapping[int, TrialSnapshot]
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
            yield _show_trial(row, spec, stored, live.get(row.id, NOT_LIVE))


def show_trial(session: Session, experiment: models.Experiment, row: models.Trial, live: TrialSnapshot) -> TrialView:
    """Return one trial, with how its last run ended."""
    (view,) = show_trials(session, experiment, [row], {row.id: live})
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


def _show_trial(row: models.Trial, spec: Experiment, stored: _Stored, live: TrialSnapshot) -> TrialView:
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
        allocation_id=live.allocation_id,
        stop_by_time=live.stop_by,
        parked=live.parked,
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


def _state(row: models.Trial, live: TrialSnapshot) -> str:
    """Return the state; of an ACTIVE trial how far its allocation is."""
    if row.state != State.ACTIVE:
        return row.state
    if row.unmanaged and row.run_id:
        return Phase.RUNNING.value
    if live.phase:
        return live.phase
    return row.state
