"""Operations of trials (§5.5), their progress, and giving up (§5.4)."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from det_core import _clock
from det_core._json import equal_json, is_number, str_to_nonfinite
from det_core.config import Experiment
from det_core.master._errors import Conflict, Invalid, NotFound
from det_core.master.scheduler import State
from det_core.master.service import _trials
from det_core.master.service._access import experiment_row, know_trial, live_trial, trial_row
from det_core.master.service._search_workers import SearchWorker
from det_core.master.store import change, models
from det_core.search import Completed, Progress

if TYPE_CHECKING:
    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveTrial
    from det_core.master.service._state import ServiceState

DECISION_TIMEOUT = 20.0
"""Maximum wait in seconds of a trial for its search; then it exits as if that was its last, and frees its slots."""
REASONS = {"INVALID_HP": "INVALID_HP", "INIT_INVALID_HP": "INVALID_HP", "USER_REQUESTED_STOP": "USER_REQUESTED_STOP"}


class OperationView(TypedDict):
    """A trial's current operation (§5.5). ``completed``: it is done, and nothing newer exists at the moment."""

    request_id: str
    length: int
    completed: bool


async def current(service: ServiceState, trial_id: int, *, allocation_id: str | None = None) -> OperationView:
    """Return the operation that a trial is to train now; waits for a search that is still to decide on its last one.

    ``allocation_id`` here and below: the one whose token was shown.

    Raises:
        NotFound: If it has none yet, or its experiment goes without.
        Fenced: If the allocation has ended.
    """
    await know_trial(service, trial_id)
    until = _clock.monotonic() + DECISION_TIMEOUT
    while _is_undecided(service, trial_id) and _clock.monotonic() < until and not service.subscriptions.is_closed:
        await service.subscriptions.wait(("trial", trial_id), service.subscriptions.cursor, until - _clock.monotonic())

    def look(tx: Transaction) -> OperationView:
        trial = live_trial(service, trial_id, allocation_id)
        if trial.length is None:
            raise NotFound(f"trial {trial_id} has no operation: its search goes without")
        if allocation_id is not None and trial.allocation is not None:
            # What it was answered binds it: see acknowledged() in _allocations.
            trial.allocation.idle = trial.completed
        return OperationView(request_id=trial.row.request_id, length=trial.length, completed=trial.completed)

    return await service.actor.do(look)


def _is_undecided(service: ServiceState, trial_id: int) -> bool:
    """Return whether the search of a trial that runs on is still to decide on its completed operation."""
    trial = service.live.trials.get(trial_id)
    if trial is None or not trial.completed or (trial.allocation is not None and trial.allocation.ending):
        return False
    return any(
        isinstance(event, Completed) and event.request_id == trial.row.request_id
        for event in trial.experiment.unanswered
    )


async def complete(
    service: ServiceState, trial_id: int, length: int, metric: Any, *, allocation_id: str | None = None
) -> None:
    """Record that a trial has trained its operation.

    Raises:
        Invalid: If the metric is not a number.
        Conflict: If this is not its current operation, or it was completed with another metric.
        Fenced: If the allocation has ended.
    """
    await know_trial(service, trial_id)
    value = as_number(metric)
    if value is None:
        raise Invalid(f"trial {trial_id}: searcherMetric must be a number, not {metric!r:.80}")
    await service.actor.do(
        lambda tx: completed(service, tx, live_trial(service, trial_id, allocation_id), length, value)
    )


def completed(service: ServiceState, tx: Transaction, trial: LiveTrial, length: int, metric: float) -> None:
    """Record that a trial's operation is done, and have its search decide; a repeat changes nothing.

    Raises:
        Conflict: it is not the current operation; or it was completed with another metric.
    """
    if trial.length == length and not trial.completed:
        tx.change(trial.operations[-1], completed=True, metric=metric, end_time=_clock.now())
        tx.publish(("trial", trial.id))
        if not trial.row.reopened:
            trial.experiment.pending.append(Completed(trial.row.request_id, length, metric))
        service.live.touch(trial.experiment)
        if trial.spent:
            _trials.retire(service, tx, trial)
        return
    # A client whose connection broke completes it again, perhaps after the search has extended the trial.
    done = next((o for o in trial.operations if o.length == length and o.completed), None)
    if done is not None:
        before = as_number(done.metric)
        if equal_json(before, metric):
            return
        raise Conflict(
            f"trial {trial.id}: the operation of length {length} was completed with {before!r} already, "
            f"so it cannot be with {metric!r}"
        )
    standing = "there is none"
    if trial.length is not None:
        standing = f"the current one is of length {trial.length}"
    raise Conflict(f"trial {trial.id} has no operation of length {length} to complete: {standing}")


def as_number(value: Any) -> float | None:
    """Return a number as a float, also one that is spelled as §2.1 says; None for anything else."""
    number = str_to_nonfinite(value)
    if not is_number(number):
        return None
    return float(number)


async def progress(
    service: ServiceState, trial_id: int, value: float, *, is_raw: bool = False, allocation_id: str | None = None
) -> None:
    """Record the progress of a managed trial that runs, or of an unmanaged one that has not ended.

    Args:
        service: State of the service.
        trial_id: Trial.
        value: Units trained.
        is_raw: Whether ``value`` is a fraction.
        allocation_id: Allocation whose token was shown.

    Raises:
        Fenced: If the trial or the allocation has ended.
    """
    if not math.isfinite(value) or value < 0:
        value = 0.0
    if trial_id not in service.live.trials:
        row = await trial_row(service, trial_id)
        if row.unmanaged and not State(row.state).terminal:
            await _progress_of_unmanaged(service, row, value, is_raw)
            return
    await service.actor.do(
        lambda tx: progressed(tx, live_trial(service, trial_id, allocation_id), value, is_raw=is_raw)
    )


async def _progress_of_unmanaged(service: ServiceState, row: models.Trial, value: float, is_raw: bool) -> None:
    experiment = await experiment_row(service, row.experiment_id)
    whole = Experiment(experiment.config).max_units
    if not is_raw:
        value = _fraction(value, whole)
    await service.store.write(lambda session: change(session, models.Trial, row.id, progress=min(value, 1.0)))
    service.subscriptions.publish(("trial", row.id))


def progressed(tx: Transaction, trial: LiveTrial, value: float, *, is_raw: bool) -> None:
    """Record the progress of a trial: units trained, or with ``is_raw`` the fraction of all that it is to train."""
    whole = whole_length(trial)
    units = value
    fraction = value
    if not is_raw:
        fraction = _fraction(units, whole)
    elif whole:
        units = fraction * whole
    tx.change(trial.row, progress=min(max(fraction, 0.0), 1.0))
    tx.publish(("trial", trial.id))
    search = trial.experiment.search
    if search is None or trial.row.reopened or (is_raw and not whole):
        return
    event = Progress(trial.row.request_id, units)
    if event.kind in search.event_kinds:
        trial.experiment.pending.append(event)
    elif isinstance(search, SearchWorker):
        # Not recorded: it decides nothing, and the newest is enough.
        tx.then(search.note, event)
    else:
        search.handle(event)  # it decides nothing, so that nothing is recorded


def _fraction(units: float, whole: int | None) -> float:
    return units / whole if whole else 0.0


def whole_length(trial: LiveTrial) -> int | None:
    """Return the units that a trial may come to train in all, None if that is not known."""
    length = trial.experiment.spec.max_units
    if length is None:
        return trial.length
    return length


async def give_up(service: ServiceState, trial_id: int, reason: str, *, allocation_id: str | None = None) -> None:
    """Record why a trial gives up (§13.5): INVALID_HP, INIT_INVALID_HP or USER_REQUESTED_STOP.

    Raises:
        Invalid: If the reason is another one.
        Fenced: If the trial or the allocation has ended.
    """
    known = REASONS.get(reason.removeprefix("EXITED_REASON_"))
    if known is None:
        raise Invalid(f"trial {trial_id}: reason is {reason!r}, and must be one of {', '.join(REASONS)}")
    await know_trial(service, trial_id)
    await service.actor.do(lambda tx: gave_up(service, tx, live_trial(service, trial_id, allocation_id), known))


def gave_up(service: ServiceState, tx: Transaction, trial: LiveTrial, reason: str) -> None:
    """Record that a trial gives up; it is killed if it still runs after a grace period."""
    if trial.row.early_exit is not None:
        return
    tx.change(trial.row, early_exit=reason)
    if trial.allocation is not None:
        tx.then(watch_exit, service, trial.id, trial.allocation.id)


def watch_exit(service: ServiceState, trial_id: int, allocation_id: str) -> None:
    """Kill a trial that has given up and does not end."""

    def end(tx: Transaction) -> None:
        trial = service.live.trials.get(trial_id)
        if trial is not None and trial.allocation is not None and trial.allocation.id == allocation_id:
            _trials.stop(service, tx, trial, State.STOPPING_KILLED, "it gave up, and did not exit")

    service.runner.later(service.settings.early_exit_grace, partial(service.actor.post, end))
