"""Trials: create, train, queue, stop, end; and what follows from the end of an allocation (§13.3, §13.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import delete

from det_core import _clock
from det_core.master.scheduler import (
    Cause,
    ExitKind,
    PendingAllocation,
    State,
    Step,
    TrialFacts,
    after_exit,
    classify,
)
from det_core.master.service import _allocations
from det_core.master.service._live import LiveExperiment, LiveTrial
from det_core.master.store import models
from det_core.search import Exited

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.orm import Session

    from det_core.master.engines import ExitReport
    from det_core.master.scheduler import Next
    from det_core.master.service._actor import Transaction
    from det_core.master.service._state import ServiceState
    from det_core.search import ExitReason

ENDED = "ENDED"
INVALID_HP = "its script raised InvalidHP: these hyperparameters cannot be trained"
"""Error of a trial that ended for its hyperparameters, which is COMPLETED."""
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
    row = models.Trial(
        id=service.live.new_trial_id(),
        experiment_id=experiment.id,
        request_id=request_id,
        task_id=f"{experiment.id}.{request_id}",
        state=State.PAUSED.value if experiment.state is State.PAUSED else State.ACTIVE.value,
        hparams=dict(hparams),
        seed=seed,
        warm_start=experiment.warm_start,
    )
    tx.add(row)
    trial = LiveTrial(row, experiment)
    adopt(service, trial)
    tx.publish(("trial", trial.id))
    enqueue(service, trial)
    return trial


def adopt(service: ServiceState, trial: LiveTrial) -> None:
    """Add a trial to those that have not ended."""
    trial.experiment.trials[trial.row.request_id] = service.live.trials[trial.id] = trial
    trial.experiment.known.add(trial.row.request_id)


def enqueue(service: ServiceState, trial: LiveTrial) -> None:
    """Queue a trial's next allocation, if it is active, has something to train and holds no allocation."""
    if trial.state is not State.ACTIVE or trial.allocation is not None or not trial.pending:
        return
    spec = trial.experiment.spec
    trial.queued = PendingAllocation(
        allocation_id=f"{trial.row.task_id}.{trial.row.run_id + 1}",
        experiment_id=trial.experiment.id,
        trial_id=trial.id,
        slots=spec.slots_per_trial,
        priority=trial.experiment.row.priority,
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
    operation = models.Operation(trial_id=trial.id, ordinal=len(trial.operations), length=length)
    trial.operations.append(operation)
    tx.add(operation)
    tx.publish(("trial", trial.id))
    enqueue(service, trial)


def close(service: ServiceState, tx: Transaction, trial: LiveTrial) -> None:
    """Note that a trial gets no further operations."""
    if not trial.row.closed:
        tx.change(trial.row, closed=True)
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
        tx.change(trial.row, state=state.value)
        tx.publish(("trial", trial.id))


def stop(service: ServiceState, tx: Transaction, trial: LiveTrial, state: State, why: str) -> None:
    """End a trial: by ``STOPPING_KILLED`` and ``STOPPING_ERROR`` at once, else after it has saved.

    Args:
        service, tx: where.
        trial: Trial.
        state: State meanwhile, STOPPING_….
        why: Reason, for people.
    """
    # Only a kill can hasten a stop.
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
    tx.change(trial.row, state=state.value, error=error, end_time=_clock.now())
    # Of a long search only the trials that go on are kept in memory.
    del experiment.trials[trial.row.request_id], service.live.trials[trial.id]
    # The search of a reopened trial has seen its end already.
    if not trial.row.reopened:
        experiment.pending.append(Exited(trial.row.request_id, reason))
    elif state is State.ERROR and error is not None:
        tx.change(experiment.row, error=error)
    service.live.touch(experiment)
    tx.publish(("trial", trial.id), ("log", trial.row.task_id))


def ended(
    service: ServiceState, tx: Transaction, allocation_id: str, report: ExitReport, *, saved: bool = False
) -> None:
    """Decide on the end of an allocation; a repeat changes nothing.

    Args:
        service: State of the service.
        tx: Transaction of the decision.
        allocation_id: Allocation.
        report: Report of its end.
        saved: Whether it saved a checkpoint.
    """
    # Also for a repeat: the engine reports an end until it is forgotten.
    tx.then(service.runner.forget, allocation_id)
    allocation = service.live.allocations.pop(allocation_id, None)
    if allocation is None:
        return
    trial = allocation.trial
    trial.allocation = None
    kind = classify(
        report.cause,
        report.status,
        report.signal,
        killed=allocation.row.kill_time is not None or (report.cause is Cause.CANCELLED and allocation.ending),
        acked=allocation.row.acked,
        tried=service.runner.tried(allocation.id),
        saved=saved,
    )
    has_failed = kind.is_error or (kind is ExitKind.PREEMPTED and _failed(report))
    tx.change(
        allocation.row,
        state=ENDED,
        exit_kind=kind.value,
        exit_status=report.status,
        exit_signal=report.signal,
        exit_detail=_describe(allocation_id, report),
        end_time=report.time,
    )
    tx.write(revoke_tokens, allocation_id)
    tx.publish(("allocation", allocation_id), ("trial", trial.id))
    after = after_exit(
        TrialFacts(
            state=trial.state,
            restarts=trial.row.restarts,
            max_restarts=trial.experiment.spec.max_restarts,
            op_complete=not trial.pending,
            closed=trial.row.closed,
            stopped=trial.stopped,
            signalled=allocation.row.preempt_time is not None,
            early_exit=trial.row.early_exit,
            failed=has_failed,
            lost=trial.losses.note(kind, allocation.row.latest_checkpoint),
        ),
        kind,
    )
    error = None
    if has_failed:
        error = _describe(allocation_id, report)
    _apply(service, tx, trial, after, error)
    service.live.touch(trial.experiment)


def _apply(service: ServiceState, tx: Transaction, trial: LiveTrial, after: Next, error: str | None) -> None:
    """Apply to a trial what was decided."""
    if after.restarts != trial.row.restarts or error is not None:
        tx.change(trial.row, restarts=after.restarts, error=error)
    if after.step is Step.END:
        if after.reason == "invalid_hp":
            error = INVALID_HP
        elif after.state is not State.ERROR:
            error = None
        end(service, tx, trial, after.state, cast("ExitReason", after.reason), error)
        return
    if after.step is Step.ALLOCATE:
        enqueue(service, trial)


def _failed(report: ExitReport) -> bool:
    """Return whether a process that acknowledged that it is about to exit failed by itself then."""
    return classify(report.cause, report.status, report.signal, tried=False) is ExitKind.FAILED


def revoke_tokens(session: Session, allocation_id: str) -> None:
    """Admit the tokens of an allocation no more."""
    session.execute(delete(models.Token).where(models.Token.allocation_id == allocation_id))


def _describe(allocation_id: str, report: ExitReport) -> str:
    """Return the description of an end for people: which allocation, how, and its last lines."""
    description = f"{allocation_id}: {report.detail}"
    if report.last_lines:
        description += "; its last lines:" + "".join(f"\n    {line}" for line in report.last_lines[-10:])
    return description
