"""Reports that make the master decide: validations, progress, giving up.

A question (an operation's completion, a checkpoint, an acknowledgement) is journaled before it is asked. As long as its
process lives the question itself counts. Of a dead process the journal makes up for the one that never arrived.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core.master._errors import is_content_error
from det_core.master.service import _allocations, _operations, _steering
from det_core.master.service._measured import VALIDATION
from det_core.master.store import trials, validations
from det_core.search import Validated

if TYPE_CHECKING:
    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveTrial
    from det_core.master.service._state import ServiceState

LOG = logging.getLogger("det_core")
Act = Callable[["ServiceState", "Transaction", "LiveTrial"], None]
"""Effect of a record on a trial that goes on."""


async def steer(
    service: ServiceState, trial_id: int, whose: str, records: Sequence[Mapping[str, Any]], *, last_will: bool
) -> None:
    """Act on records of a trial that goes on, in their order.

    Args:
        service: State of the service.
        trial_id: Trial.
        whose: Name of the run, for messages.
        records: Records as they stand in a journal.
        last_will: Whether the process is dead: see above.
    """
    trial = service.live.trials.get(trial_id)
    if trial is None:
        return
    for record in telling(trial, records, last_will=last_will):
        try:
            await _follow(service, trial, record)
        except Exception as e:
            if not is_content_error(e):
                raise
            LOG.warning("trial %d, %s: ignoring record %r in its journal: %r", trial_id, whose, record["kind"], e)


async def _follow(service: ServiceState, trial: LiveTrial, record: Mapping[str, Any]) -> None:
    if record["kind"] == "metadata":
        metadata = dict(record["body"]["metadata"])
        await service.store.write(lambda session: trials.set_metadata(session, trial.id, metadata))
    else:
        act = _read_act(record)  # before the actor, which would have to begin anew if this raised there
        await service.actor.do(lambda tx: _act(service, tx, trial.id, act))


def telling(trial: LiveTrial, records: Sequence[Mapping[str, Any]], *, last_will: bool) -> list[Mapping[str, Any]]:
    """Return the records that matter; of progress and status only the last."""
    kinds = {*_READERS, "metadata"}
    if not last_will:
        kinds -= _QUESTIONS
    validated = goes_by_validations(trial)
    # Each act is a decision with its commit, and older ones would be overwritten at once.
    last: dict[str, Mapping[str, Any]] = {r["kind"]: r for r in records if r.get("kind") in ("progress", "status")}
    return [
        r
        for r in records
        if (r["kind"] == "metrics" and validated and r["group"] == VALIDATION)
        or (r["kind"] in kinds and last.get(r["kind"], r) is r)
    ]


def goes_by_validations(trial: LiveTrial) -> bool:
    """Return whether a trial's search receives its validations."""
    search = trial.experiment.search
    spec = trial.experiment.spec
    if search is None or trial.row.reopened or Validated.kind not in search.event_kinds:
        return False
    return spec.time_metric is not None or bool(spec.searcher.get("class"))


async def catch_up(service: ServiceState, trial: LiveTrial) -> None:
    """Hand a search the stored validations of its trial that it has not received."""
    metric = trial.experiment.spec.metric
    found = await service.store.read(lambda session: validations.of_trial(session, trial.id, metric))
    records = [
        {"kind": "metrics", "group": VALIDATION, "metrics": row.metrics, "steps_completed": row.steps_completed}
        for row, _ in found
    ]
    if records:
        await steer(service, trial.id, f"run {trial.row.run_id}", records, last_will=False)


def _act(service: ServiceState, tx: Transaction, trial_id: int, act: Act) -> None:
    trial = service.live.trials.get(trial_id)
    if trial is not None:
        act(service, tx, trial)


def _read_act(record: Mapping[str, Any]) -> Act:
    """Return what a record asks for; raise anything if its content does not say so."""
    if record["kind"] == "metrics":
        values = record["metrics"]
        steps = record["steps_completed"]
        return lambda service, tx, trial: validated(service, tx, trial, values, steps)
    return _READERS[record["kind"]](record["body"])


def validated(
    service: ServiceState, tx: Transaction, trial: LiveTrial, values: Mapping[str, Any], steps: int | None
) -> None:
    """Hand a search a validation of its trial, each step once."""
    spec = trial.experiment.spec
    if not goes_by_validations(trial):
        return
    metric = _value(values, spec.metric)
    step = steps if spec.time_metric is None else _value(values, spec.time_metric)
    if metric is None or step is None or not -1 < step < 2**63:
        if spec.time_metric is not None:
            missing = spec.metric if metric is None else spec.time_metric
            _steering.fail(service, tx, trial.experiment, f"trial {trial.id}: a validation has no number {missing!r}")
    elif int(step) > trial.row.validated:
        tx.change(trial.row, validated=int(step))
        trial.experiment.pending.append(Validated(trial.row.request_id, int(step), metric))
        service.live.touch(trial.experiment)


def _value(values: Mapping[str, Any], name: str) -> float | None:
    number = validations.number(values, name)
    if number is None:
        return _operations.as_number(values.get(name))
    return number


def _operation(body: Mapping[str, Any]) -> Act:
    metric = _operations.as_number(body["searcher_metric"])
    if metric is None:
        raise TypeError(f"searcher_metric {body['searcher_metric']!r:.80} is not a number")
    length = int(body["length"])
    return lambda service, tx, trial: _operations.completed(service, tx, trial, length, metric)


def _acknowledged(body: Mapping[str, Any]) -> Act:
    acknowledged = body.get("acknowledged", True)

    def act(service: ServiceState, tx: Transaction, trial: LiveTrial) -> None:
        if trial.allocation is not None and acknowledged:
            _allocations.acknowledged(service, tx, trial.allocation)

    return act


def _out_of_operations(body: Mapping[str, Any]) -> Act:
    acknowledge = _acknowledged(body)

    def act(service: ServiceState, tx: Transaction, trial: LiveTrial) -> None:
        if trial.allocation is not None:
            trial.allocation.idle = True  # the master answered so, or the process would not have reported this
        acknowledge(service, tx, trial)

    return act


def _gave_up(body: Mapping[str, Any]) -> Act:
    reason = _operations.REASONS[str(body["reason"]).removeprefix("EXITED_REASON_")]
    return lambda service, tx, trial: _operations.gave_up(service, tx, trial, reason)


def _progressed(body: Mapping[str, Any]) -> Act:
    is_raw = "fraction" in body
    value = float(body.get("fraction", body.get("units")))
    if not math.isfinite(value) or value < 0:
        value = 0.0
    return lambda service, tx, trial: _operations.progressed(tx, trial, value, is_raw=is_raw)


def _status(body: Mapping[str, Any]) -> Act:
    status = str(body["status"])
    return lambda service, tx, trial: tx.change(trial.row, status=status)


_READERS: dict[str, Callable[[Mapping[str, Any]], Act]] = {
    "operation": _operation,
    "preempt": _acknowledged,
    "out_of_operations": _out_of_operations,
    "early_exit": _gave_up,
    "progress": _progressed,
    "status": _status,
}
_QUESTIONS = {"operation", "preempt", "out_of_operations", "metadata"}
"""Kinds of records that count only where the process died before it could ask."""
