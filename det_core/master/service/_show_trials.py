"""Trials as they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from det_core.config import Experiment
from det_core.master.scheduler import Phase, State
from det_core.master.service._lengths import longest, unit
from det_core.master.service._views import TrialView, ValidationView
from det_core.master.store import allocations, checkpoints, metrics, operations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from det_core.master.service._live import LiveTrial
    from det_core.master.store.experiments import ExperimentRow
    from det_core.master.store.metrics import MetricRow, Validation
    from det_core.master.store.operations import OperationRow
    from det_core.master.store.trials import TrialRow


@dataclass(frozen=True)
class Known:
    """What is kept of an experiment's trials beside their rows, by trial."""

    operations: dict[int, OperationRow]
    checkpoints: dict[int, str]
    latest: dict[int, MetricRow]
    best: dict[int, Validation]
    steps: dict[int, int]
    summaries: dict[int, Any] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    """How their last runs ended, as a shell tells it."""


def know(conn: Connection, experiment: ExperimentRow, rows: Sequence[TrialRow], *, summaries: bool) -> Known:
    """Look up what is kept of trials of one experiment; ``summaries``: also what is shown of a single trial alone."""
    spec, ids = Experiment(experiment.config), [row.id for row in rows]
    better = spec.smaller_is_better
    if len(ids) == 1:
        found = metrics.best_validation(conn, ids[0], spec.metric, smaller_is_better=better)
        best = {} if found is None else {ids[0]: found}
        validated = _latest_validations(conn, ids)
    else:
        best = metrics.best_validations(conn, experiment.id, spec.metric, smaller_is_better=better)
        validated = _latest_validations(conn, list(best))
    if len(ids) == 1:
        one = operations.current(conn, ids[0])
        given = {} if one is None else {ids[0]: one}
        newest = checkpoints.latest(conn, ids[0])
        latest = {} if newest is None else {ids[0]: newest.uuid}
    else:
        given = operations.current_of_experiment(conn, experiment.id)
        latest = _latest(conn, experiment.id)
    return Known(
        operations=given,
        checkpoints=latest,
        latest=validated,
        best=best,
        steps=metrics.total_steps(conn, ids),
        summaries=metrics.summaries(conn, ids) if summaries else {},
        exits=_exits(conn, rows) if summaries else {},
    )


def _exits(conn: Connection, rows: Sequence[TrialRow]) -> dict[int, int]:
    found = {row.id: allocations.of_run(conn, row.id, row.run_id) for row in rows}
    told = {}
    for number, run in found.items():
        if run is not None and run.exit_signal is not None:
            told[number] = 128 + run.exit_signal
        elif run is not None and run.exit_status is not None:
            told[number] = run.exit_status
    return told


def _latest_validations(conn: Connection, ids: Sequence[int]) -> dict[int, MetricRow]:
    found = {number: metrics.latest_validation(conn, number) for number in ids}
    return {number: row for number, row in found.items() if row is not None}


def _latest(conn: Connection, experiment_id: int) -> dict[int, str]:
    """Trial -> the checkpoint that its next run would start from."""
    found = checkpoints.of_experiment(conn, experiment_id, states=[checkpoints.COMPLETED])
    best = sorted(found, key=lambda c: (c.steps_completed, c.report_time))
    return {c.trial_id: c.uuid for c in best}


def show(row: TrialRow, spec: Experiment, known: Known, live: LiveTrial | None) -> TrialView:
    """One trial."""
    operation, latest, best = known.operations.get(row.id), known.latest.get(row.id), known.best.get(row.id)
    allocation = None if live is None else live.allocation
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
        allocation_id=None if allocation is None else allocation.id,
        stop_by_time=None if allocation is None else allocation.stop_by,
        parked=live is not None and allocation is None and not live.pending and not live.closed,
        progress=_progress(row, spec, known),
        total_batches=known.steps.get(row.id, 0),
        operation_length=None if operation is None else operation.length,
        operation_completed=operation is not None and operation.completed,
        latest_checkpoint=known.checkpoints.get(row.id),
        latest_validation=None if latest is None else _validation(latest, metrics.number(latest.metrics, spec.metric)),
        best_validation=None if best is None else _validation(best.row, best.value),
        summary_metrics=known.summaries.get(row.id, {}),
        start_time=row.start_time,
        end_time=row.end_time,
        error=row.error,
        exit_status=known.exits.get(row.id),
    )


def _progress(row: TrialRow, spec: Experiment, known: Known) -> float:
    """How far a trial is: what it has said, or what the steps it has reported are of all that it may come to train."""
    if row.state == State.COMPLETED:
        return 1.0
    operation = known.operations.get(row.id)
    whole = longest(spec) or (None if operation is None else operation.length)
    steps = known.steps.get(row.id, 0)
    if not whole or steps > whole or unit(spec) not in (None, "batches"):
        return row.progress  # its steps are of another kind
    return max(row.progress, steps / whole)


def _validation(row: MetricRow, metric: float | None) -> ValidationView:
    return ValidationView(
        total_batches=row.steps_completed or 0,
        metrics=row.metrics,
        metric=metric,
        end_time=row.time,
        trial_run_id=row.run_id,
    )


def _state(row: TrialRow, live: LiveTrial | None) -> str:
    """The state, with how far its allocation is if it is ACTIVE."""
    if row.state != "ACTIVE" or row.unmanaged:
        return "RUNNING" if row.unmanaged and row.state == "ACTIVE" and row.run_id else row.state
    if live is None or (live.allocation is None and not live.pending):
        return row.state
    if live.allocation is None:
        return Phase.QUEUED.value
    return Phase.RUNNING.value if live.allocation.ready else Phase.STARTING.value
