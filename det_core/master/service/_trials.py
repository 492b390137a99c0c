"""Trials: create, train, queue, stop, end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from det_core import _clock
from det_core.master.scheduler import PendingAllocation, State
from det_core.master.service import _allocations
from det_core.master.service._live import LiveExperiment, LiveTrial
from det_core.master.store import change, models, trials
from det_core.search import Exited

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.orm import Session

    from det_core.master.service._actor import Transaction
    from det_core.master.service._state import ServiceState
    from det_core.search import ExitReason

_REASONS: dict[State, ExitReason] = {State.CANCELED: "canceled", State.ERROR: "errored"}
"""Reasons for the search by the state in which a trial ends; of any other the trial has completed."""


def create(
    service: ServiceState,
    tx: Transaction,
    experiment: LiveExperiment,
    request_id: str,
    hparams: Mapping[str, Any],
    seed: int,
) -> LiveTrial:
    """Create a trial; it is queued as soon as there is something to train."""
    trial = LiveTrial(
        id=service.live.new_trial_id(),
        experiment=experiment,
        request_id=request_id,
        task_id=f"{experiment.id}.{request_id}",
        seed=seed,
        hparams=dict(hparams),
        state=State.PAUSED if experiment.state is State.PAUSED else State.ACTIVE,
        warm_start=experiment.warm_start,
    )
    adopt(service, trial)
    tx.write(
        trials.create,
        experiment.id,
        request_id,
        id=trial.id,
        state=trial.state.value,
        hparams=trial.hparams,
        seed=seed,
        warm_start=trial.warm_start,
    )
    tx.publish(("trial", trial.id))
    enqueue(service, trial)
    return trial


def adopt(service: ServiceState, trial: LiveTrial) -> None:
    """Add a trial to those that have not ended."""
    trial.experiment.trials[trial.request_id] = service.live.trials[trial.id] = trial
    trial.experiment.known[trial.request_id] = trial.id


def enqueue(service: ServiceState, trial: LiveTrial) -> None:
    """Queue a trial's next allocation, if it is active, has something to train and holds no allocation."""
    if trial.state is not State.ACTIVE or trial.allocation is not None or not trial.pending:
        return
    spec = trial.experiment.spec
    trial.queued = PendingAllocation(
        allocation_id=f"{trial.task_id}.{trial.run_id + 1}",
        experiment_id=trial.experiment.id,
        trial_id=trial.id,
        slots=spec.slots_per_trial,
        priority=trial.experiment.priority,
        max_slots=spec.max_slots,
    )
    service.live.queue[trial.id] = trial


def reprioritise(service: ServiceState, experiment_id: int) -> None:
    """Queue the waiting trials of an experiment anew, under its changed priority."""
    for trial in list(service.live.queue.values()):
        if trial.experiment.id == experiment_id:
            enqueue(service, trial)


def dequeue(service: ServiceState, trial: LiveTrial) -> None:
    """Take a trial off the queue."""
    trial.queued = None
    service.live.queue.pop(trial.id, None)


def train_to(service: ServiceState, tx: Transaction, trial: LiveTrial, length: int) -> None:
    """Give a trial its next operation."""
    trial.operations += 1
    trial.length = length
    trial.completed = False
    tx.write(_add_operation, trial.id, trial.operations - 1, length)
    tx.publish(("trial", trial.id))
    enqueue(service, trial)


def _add_operation(session: Session, trial_id: int, ordinal: int, length: int) -> None:
    session.add(models.Operation(trial_id=trial_id, ordinal=ordinal, length=length))


def close(service: ServiceState, tx: Transaction, trial: LiveTrial) -> None:
    """Note that a trial gets no further operations."""
    if not trial.closed:
        trial.closed = True
        tx.write(change, models.Trial, trial.id, closed=True)
        tx.publish(("trial", trial.id))
    retire(service, tx, trial)


def retire(service: ServiceState, tx: Transaction, trial: LiveTrial) -> None:
    """End a trial that has nothing left to do; one that still runs is asked to stop."""
    if not trial.spent or trial.state.stopping:
        return
    if trial.allocation is None:
        end(service, tx, trial, State.COMPLETED, "completed")
    else:
        _allocations.ask_to_stop(service, tx, trial.allocation, "its search is done with it")


def set_state(tx: Transaction, trial: LiveTrial, state: State) -> None:
    """Change a trial's state alone."""
    if trial.state is not state:
        trial.state = state
        tx.write(change, models.Trial, trial.id, state=state.value)
        tx.publish(("trial", trial.id))


def stop(service: ServiceState, tx: Transaction, trial: LiveTrial, state: State, why: str) -> None:
    """End a trial: by ``STOPPING_KILLED`` and ``STOPPING_ERROR`` at once, else after it has saved.

    Args:
        service, tx: where.
        trial: Trial.
        state: State meanwhile, STOPPING_….
        why: Reason, for people.
    """
    if trial.state.stopping and state is not State.STOPPING_KILLED:
        return
    dequeue(service, trial)
    if trial.allocation is None:
        end(service, tx, trial, state.end, _REASONS.get(state.end, "completed"))
        return
    set_state(tx, trial, trial.state.after_order(state))
    if state in (State.STOPPING_KILLED, State.STOPPING_ERROR):
        _allocations.kill(service, tx, trial.allocation, why)
    else:
        _allocations.ask_to_stop(service, tx, trial.allocation, why)


def end(
    service: ServiceState, tx: Transaction, trial: LiveTrial, state: State, reason: ExitReason, error: str | None = None
) -> None:
    """End a trial: remove it from the live state and notify its search."""
    experiment = trial.experiment
    dequeue(service, trial)
    trial.state = state
    tx.write(
        change, models.Trial, trial.id, state=state.value, error=error, restarts=trial.restarts, end_time=_clock.now()
    )
    del experiment.trials[trial.request_id], service.live.trials[trial.id]
    if trial.reopened:
        if state is State.ERROR:
            experiment.error = error or experiment.error
    else:
        experiment.pending.append(Exited(trial.request_id, reason))
    service.live.touch(experiment)
    tx.publish(("trial", trial.id), ("log", trial.task_id))
