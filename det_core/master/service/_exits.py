"""Decisions at the end of an allocation (§13.3, §13.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sqlalchemy import delete

from det_core.master.scheduler import Cause, ExitKind, State, Step, TrialFacts, after_exit, classify
from det_core.master.service import _trials
from det_core.master.store import change, models

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.engines import ExitReport
    from det_core.master.scheduler import Next
    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveAllocation, LiveTrial
    from det_core.master.service._state import ServiceState
    from det_core.search import ExitReason

ENDED = "ENDED"
INVALID_HP = "its script raised InvalidHP: these hyperparameters cannot be trained"
"""Error of a trial that ended for its hyperparameters, which is COMPLETED."""


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
        killed=allocation.kill_time is not None or (report.cause is Cause.CANCELLED and allocation.ending),
        acked=allocation.acked,
        tried=service.runner.tried(allocation.id),
        saved=saved,
    )
    has_failed = kind.is_error or (kind is ExitKind.PREEMPTED and _failed(report))
    _write(tx, allocation, report, kind)
    tx.publish(("allocation", allocation_id), ("trial", trial.id))
    after = after_exit(
        TrialFacts(
            state=trial.state,
            restarts=trial.restarts,
            max_restarts=trial.experiment.spec.max_restarts,
            op_complete=not trial.pending,
            closed=trial.closed,
            stopped=trial.stopped,
            signalled=allocation.preempt_time is not None,
            early_exit=trial.early_exit,
            failed=has_failed,
            lost=trial.losses.note(kind, allocation.latest_checkpoint),
        ),
        kind,
    )
    error = _describe(allocation_id, report) if has_failed else None
    _follow(service, tx, trial, after, error)
    service.live.touch(trial.experiment)


def _follow(service: ServiceState, tx: Transaction, trial: LiveTrial, after: Next, error: str | None) -> None:
    """Apply to a trial what was decided."""
    counted = after.restarts != trial.restarts
    trial.restarts = after.restarts
    if after.step is Step.END:
        if after.reason == "invalid_hp":
            error = INVALID_HP
        elif after.state is not State.ERROR:
            error = None
        _trials.end(service, tx, trial, after.state, cast("ExitReason", after.reason), error)
        return
    if counted or error is not None:
        tx.write(change, models.Trial, trial.id, restarts=trial.restarts, error=error)
    if after.step is Step.ALLOCATE:
        _trials.enqueue(service, trial)


def _failed(report: ExitReport) -> bool:
    """Return whether a process that acknowledged that it is about to exit failed by itself then."""
    return classify(report.cause, report.status, report.signal, tried=False) is ExitKind.FAILED


def _write(tx: Transaction, allocation: LiveAllocation, report: ExitReport, kind: ExitKind) -> None:
    tx.write(
        change,
        models.Allocation,
        allocation.id,
        state=ENDED,
        exit_kind=kind.value,
        exit_status=report.status,
        exit_signal=report.signal,
        exit_detail=_describe(allocation.id, report),
        end_time=report.time,
    )
    tx.write(revoke_tokens, allocation.id)


def revoke_tokens(session: Session, allocation_id: str) -> None:
    """Admit the tokens of an allocation no more."""
    session.execute(delete(models.Token).where(models.Token.allocation_id == allocation_id))


def _describe(allocation_id: str, report: ExitReport) -> str:
    """Return the description of an end for people: which allocation, how, and its last lines."""
    description = f"{allocation_id}: {report.detail}"
    if report.last_lines:
        description += "; its last lines:" + "".join(f"\n    {line}" for line in report.last_lines[-10:])
    return description
