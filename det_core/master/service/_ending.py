"""Ends of experiments: by their search, by a person, by an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core import _clock
from det_core.master.scheduler import State
from det_core.master.service import _measured, _retention, _trials
from det_core.master.service._search_workers import SearchWorker
from det_core.master.store import change, models

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveExperiment
    from det_core.master.service._state import ServiceState


def stop(service: ServiceState, tx: Transaction, experiment: LiveExperiment, state: State, why: str) -> None:
    """Stop all trials of an experiment, which ends when the last one has.

    Args:
        service: State of the service.
        tx: Transaction of the decision.
        experiment: Experiment.
        state: State meanwhile, STOPPING_….
        why: Reason, for people.
    """
    if experiment.state.stopping and state is not State.STOPPING_KILLED:
        return
    experiment.state = experiment.state.after_order(state)
    tx.write(change, models.Experiment, experiment.id, state=experiment.state.value, error=experiment.error)
    tx.publish(("experiment", experiment.id))
    for trial in sorted(experiment.trials.values(), key=lambda t: t.id):
        _trials.stop(service, tx, trial, state, why)
    _stop_search(tx, experiment)
    service.live.touch(experiment)


def _stop_search(tx: Transaction, experiment: LiveExperiment) -> None:
    """Kill the process of a search of which nothing will be asked any more, even if it hangs."""
    if isinstance(experiment.search, SearchWorker):
        tx.then(experiment.search.stop)


def fail(service: ServiceState, tx: Transaction, experiment: LiveExperiment, error: str) -> None:
    """End an experiment by an error."""
    experiment.error = error
    stop(service, tx, experiment, State.STOPPING_ERROR, error)


def _write(session: Session, experiment_id: int, state: State, progress: float, error: str | None) -> None:
    row = session.get(models.Experiment, experiment_id)
    if state is State.COMPLETED and row is not None and (error := _measured.fault(session, row)) is not None:
        state = State.ERROR
    change(
        session,
        models.Experiment,
        experiment_id,
        state=state.value,
        progress=progress,
        error=error,
        end_time=_clock.now(),
    )


def finish(service: ServiceState, tx: Transaction, experiment: LiveExperiment) -> None:
    """End an experiment without trials that stops: remove it from the live state and apply its retention."""
    if experiment.trials or experiment.id not in service.live.experiments:
        return
    if experiment.alive and experiment.search is not None and experiment.search.over:  # it was continued
        experiment.state = State.STOPPING_ERROR if experiment.error else State.STOPPING_COMPLETED
    if not experiment.state.stopping:
        return
    experiment.state = experiment.state.end
    progress = 1.0
    if experiment.state is not State.COMPLETED and experiment.search is not None:
        progress = experiment.search.progress()
    tx.write(_write, experiment.id, experiment.state, progress, experiment.error)
    tx.write(_retention.due, add=experiment.id)
    _stop_search(tx, experiment)
    del service.live.experiments[experiment.id]
    tx.publish(("experiment", experiment.id))
    tx.then(service.runner.retain, experiment.id)
