"""Changes of experiments: pause, activate, stop, end, priority, patch; and the kill of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core import _clock
from det_core._storage_settings import RETENTION_KEYS
from det_core.config import Experiment
from det_core.master._errors import Invalid, WrongState
from det_core.master.scheduler import State
from det_core.master.service import _allocations, _measured, _queries, _retention, _trials
from det_core.master.service._access import experiment_row, know_experiment, live_experiment, trial_row
from det_core.master.service._search_workers import SearchWorker
from det_core.master.store import change, models

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveExperiment, LiveTrial
    from det_core.master.service._state import ServiceState
    from det_core.protocol.records import ExperimentView


async def pause(service: ServiceState, experiment_id: int) -> None:
    """Have all trials of an experiment save and stop until :func:`activate`.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If it has ended, is about to end, or is unmanaged.
    """

    def command(tx: Transaction) -> None:
        for trial in _switch(service, tx, experiment_id, State.PAUSED):
            _trials.dequeue(service, trial)
            if trial.allocation is not None:
                _allocations.ask_to_stop(service, tx, trial.allocation, "its experiment was paused")

    await know_experiment(service, experiment_id)
    await service.actor.do(command)


async def activate(service: ServiceState, experiment_id: int) -> None:
    """Let a paused experiment go on; nothing changes for an active one.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If it has ended, is about to end, or is unmanaged.
    """

    def command(tx: Transaction) -> None:
        for trial in _switch(service, tx, experiment_id, State.ACTIVE):
            _trials.enqueue(service, trial)

    await know_experiment(service, experiment_id)
    await service.actor.do(command)


def _switch(service: ServiceState, tx: Transaction, experiment_id: int, state: State) -> list[LiveTrial]:
    """Change an experiment to ACTIVE or PAUSED, with its trials in the other state; return these.

    Raises:
        WrongState: If it is about to end.
    """
    experiment = live_experiment(service, experiment_id)
    if not experiment.alive:
        raise WrongState(f"experiment {experiment_id} is about to end ({experiment.state})")
    if experiment.state is state:
        return []
    other = experiment.state
    tx.change(experiment.row, state=state.value)
    tx.publish(("experiment", experiment_id))
    trials = [trial for trial in experiment.trials.values() if trial.state is other]
    for trial in trials:
        _trials.set_state(tx, trial, state)
    return trials


async def cancel(service: ServiceState, experiment_id: int) -> None:
    """Have all trials of an experiment save and stop, for good; nothing changes for an ended one.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If it is unmanaged.
    """
    await _end(service, experiment_id, State.STOPPING_CANCELED, "its experiment was canceled")


async def kill(service: ServiceState, experiment_id: int) -> None:
    """Kill all trials of an experiment, for good; nothing changes for an ended one.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If it is unmanaged.
    """
    await _end(service, experiment_id, State.STOPPING_KILLED, "its experiment was killed")


async def _end(service: ServiceState, experiment_id: int, state: State, why: str) -> None:
    def command(tx: Transaction) -> None:
        experiment = service.live.experiments.get(experiment_id)
        if experiment is not None:
            stop(service, tx, experiment, state, why)

    if experiment_id not in service.live.experiments:
        row = await experiment_row(service, experiment_id)  # ended is ended
        if row.unmanaged:
            raise WrongState(f"experiment {experiment_id} is unmanaged: whoever runs its trials ends them")
        return
    await service.actor.do(command)


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
    tx.change(experiment.row, state=experiment.state.after_order(state).value)
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
    tx.change(experiment.row, error=error)
    stop(service, tx, experiment, State.STOPPING_ERROR, error)


def _note_fault(session: Session, experiment_id: int) -> None:
    """Have a completed experiment end in an error if its trials never reported the metric of its search."""
    row = session.get(models.Experiment, experiment_id)
    error = None if row is None else _measured.fault(session, row)
    if error is not None:
        change(session, models.Experiment, experiment_id, state=State.ERROR.value, error=error)


def finish(service: ServiceState, tx: Transaction, experiment: LiveExperiment) -> None:
    """End an experiment without trials that stops: remove it from the live state and apply its retention."""
    if experiment.trials or experiment.id not in service.live.experiments:
        return
    state = experiment.state
    if experiment.alive and experiment.search is not None and experiment.search.over:  # it was continued
        state = State.STOPPING_ERROR if experiment.row.error else State.STOPPING_COMPLETED
    if not state.stopping:
        return
    progress = 1.0
    if state.end is not State.COMPLETED and experiment.search is not None:
        progress = experiment.search.progress()
    tx.change(experiment.row, state=state.end.value, progress=progress, end_time=_clock.now())
    if state.end is State.COMPLETED:
        tx.write(_note_fault, experiment.id)
    tx.write(_retention.due, add=experiment.id)
    _stop_search(tx, experiment)
    del service.live.experiments[experiment.id]
    tx.publish(("experiment", experiment.id))
    tx.then(service.runner.retain, experiment.id)


async def kill_trial(service: ServiceState, trial_id: int) -> None:
    """Kill one trial, for good; its search receives that it was canceled.

    Raises:
        NotFound: If the trial does not exist.
        WrongState: If it is unmanaged.
    """

    def command(tx: Transaction) -> None:
        trial = service.live.trials.get(trial_id)
        if trial is not None:
            _trials.stop(service, tx, trial, State.STOPPING_KILLED, "it was killed by a person")

    if trial_id not in service.live.trials:
        row = await trial_row(service, trial_id)
        if row.unmanaged:
            raise WrongState(f"trial {trial_id} is unmanaged: whoever runs it ends it")
        return
    await service.actor.do(command)


async def set_priority(service: ServiceState, experiment_id: int, priority: int) -> None:
    """Change the priority of an experiment, 1 (first) to 99; the next placement follows it."""
    if isinstance(priority, bool) or not 1 <= priority <= 99:
        raise Invalid(f"experiment {experiment_id}: priority is {priority}, and must be from 1 (first) to 99")
    await know_experiment(service, experiment_id)

    def command(tx: Transaction) -> None:
        experiment = live_experiment(service, experiment_id)
        tx.change(experiment.row, priority=priority)
        tx.publish(("experiment", experiment_id))
        _trials.reprioritise(service, experiment_id)

    await service.actor.do(command)


async def patch_experiment(
    service: ServiceState,
    experiment_id: int,
    *,
    name: str | None = None,
    description: str | None = None,
    priority: int | None = None,
    checkpoint_storage: Mapping[str, Any] | None = None,
) -> ExperimentView:
    """Change what is given and return the experiment.

    Args:
        service: State of the service.
        experiment_id: ID of the experiment.
        name: New name.
        description: New description.
        priority: New priority, 1 (first) to 99, of an experiment that has not ended.
        checkpoint_storage: New counts of checkpoints to keep, ``save_…``; applied at once if it has ended.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If the priority cannot be changed because it has ended.
        Invalid: If a value is not allowed.
    """
    if priority is not None:
        await set_priority(service, experiment_id, priority)
    await experiment_row(service, experiment_id)
    if name is not None and not name.strip():
        raise Invalid(f"experiment {experiment_id}: a name cannot be empty")
    counts = _counts(experiment_id, checkpoint_storage or {})

    def write(session: Session) -> dict[str, Any] | None:
        row = session.get(models.Experiment, experiment_id)
        assert row is not None
        data = dict(row.config)
        if name is not None:
            data["name"] = name
            row.name = name
        if description is not None:
            data["description"] = description
            row.description = description
        data["checkpoint_storage"] = {**data["checkpoint_storage"], **counts}
        row.config = data
        return data

    data = await service.store.write(write)
    service.subscriptions.publish(("experiment", experiment_id))
    live = service.live.experiments.get(experiment_id)
    if live is not None and data is not None:
        live.spec = Experiment(data, live.spec.warnings)
    elif counts:
        service.runner.retain(experiment_id)
    return await _queries.experiment(service, experiment_id)


def _counts(experiment_id: int, storage: Mapping[str, Any]) -> dict[str, int]:
    wrong = [
        k
        for k, v in storage.items()
        if k not in RETENTION_KEYS or isinstance(v, bool) or not isinstance(v, int) or v < 0
    ]
    if wrong:
        raise Invalid(
            f"experiment {experiment_id}: checkpoint_storage.{wrong[0]} cannot be changed to {storage[wrong[0]]!r}; "
            f"only {', '.join(RETENTION_KEYS)} can, to integers of 0 or more"
        )
    return {k: int(v) for k, v in storage.items()}
