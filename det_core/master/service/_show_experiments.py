"""Experiments as they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from det_core.config import Experiment
from det_core.master.scheduler import DEFAULT_PRIORITY, State
from det_core.master.service import _measured
from det_core.master.service._search_workers import SearchWorker
from det_core.master.store import models, validations
from det_core.protocol.records import ExperimentView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

    from det_core.master.service._live import LiveExperiment
    from det_core.master.service._state import ServiceState
    from det_core.master.store.validations import BestTrial

NO_METRIC = "unmanaged"
"""What stands for the metric in the configuration of an experiment that has none (§9)."""


@dataclass(frozen=True)
class Snapshot:
    """State of an experiment in memory, copied on the loop: readers have threads of their own.

    Attributes:
        progress: Fraction of its search that is done; None without a search.
        stop_by: Times at which allocations that were told to stop are killed.
        remarks: What there is to say of it.
    """

    progress: float | None
    stop_by: tuple[float, ...]
    remarks: tuple[str, ...]


def snapshots(service: ServiceState) -> dict[int, Snapshot]:
    """Return snapshots of the experiments that have not ended. Call it on the loop."""
    return {number: _snapshot(experiment) for number, experiment in service.live.experiments.items()}


def snapshot(service: ServiceState, experiment_id: int) -> dict[int, Snapshot]:
    """Return a snapshot of one experiment; none if it has ended. Call it on the loop."""
    live = service.live.experiments.get(experiment_id)
    if live is None:
        return {}
    return {experiment_id: _snapshot(live)}


def _snapshot(experiment: LiveExperiment) -> Snapshot:
    allocations = [trial.allocation for trial in experiment.trials.values() if trial.allocation is not None]
    measured = experiment.measured
    remarks = []
    if measured.warning is not None and not measured.known:
        remarks.append(measured.warning)
    if isinstance(experiment.search, SearchWorker):
        remarks += experiment.search.remarks()
    return Snapshot(
        progress=None if experiment.search is None else experiment.search.progress(),
        stop_by=tuple(end for end in (allocation.stop_by for allocation in allocations) if end is not None),
        remarks=tuple(remarks),
    )


def show(
    session: Session, service: ServiceState, rows: Sequence[models.Experiment], live: Mapping[int, Snapshot]
) -> list[ExperimentView]:
    """Return experiments as they are shown."""
    trial = models.Trial
    counting = select(trial.experiment_id, func.count()).where(trial.experiment_id.in_([row.id for row in rows]))
    counts = {number: count for number, count in session.execute(counting.group_by(trial.experiment_id))}
    best = best_of(session, rows)
    return [
        _one(
            row,
            counts.get(row.id, 0),
            best.get(row.id),
            live.get(row.id),
            _remarks(session, service, row, live.get(row.id)),
        )
        for row in rows
    ]


def _remarks(session: Session, service: ServiceState, row: models.Experiment, live: Snapshot | None) -> list[str]:
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


def _one(
    row: models.Experiment, num_trials: int, best: BestTrial | None, live: Snapshot | None, remarks: list[str]
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
        labels=list(row.labels),
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
        archived=row.archived,
        unmanaged=row.unmanaged,
        parent_id=row.parent_id,
        external_id=row.external_id,
        start_time=row.start_time,
        end_time=row.end_time,
        best_trial_id=None if best is None else best.trial_id,
        best_metric=None if best is None else best.value,
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
        labels=spec.labels,
        state="PAUSED",
        config=spec.data,
        searcher_type=str(spec.searcher["name"]),
        searcher_metric=spec.metric,
        smaller_is_better=spec.smaller_is_better,
        priority=DEFAULT_PRIORITY if spec.priority is None else spec.priority,
        warnings=list(spec.warnings),
    )
