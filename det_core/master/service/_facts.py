"""What in a journal, or in a report, makes the master decide: validations, progress, giving up.

A question (an operation's completion, a checkpoint, an acknowledgement) is journaled before it is asked. As long as its
process lives the question itself counts. Of a dead process the journal makes up for the one that never arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core.master._errors import MasterError
from det_core.master.service import _allocations, _checkpoints, _ending, _operations
from det_core.master.service._measured import VALIDATION
from det_core.master.store import trials
from det_core.master.store.metrics import number, validations
from det_core.search import Validated

if TYPE_CHECKING:
    from det_core.master.service._actor import Transaction
    from det_core.master.service._hub import Hub
    from det_core.master.service._live import LiveTrial

LOG = logging.getLogger("det_core")


async def steer(hub: Hub, trial_id: int, whose: str, records: Sequence[Mapping[str, Any]], *, last_will: bool) -> None:
    """Act on records of a trial that goes on, in their order.

    Args:
        hub: where.
        trial_id: the trial.
        whose: the attempt, for messages.
        records: as they stand in a journal.
        last_will: its process is dead: see above.
    """
    trial = hub.live.trials[trial_id]
    for record in telling(trial, records, last_will=last_will):
        try:
            await _follow(hub, trial, record)
        except (MasterError, LookupError, TypeError, ValueError) as e:
            if isinstance(e, MasterError) and e.status >= 500:
                raise
            LOG.warning("trial %d, %s: a %s in its journal is passed over: %s", trial_id, whose, record["kind"], e)


async def _follow(hub: Hub, trial: LiveTrial, record: Mapping[str, Any]) -> None:
    if record["kind"] == "checkpoint":
        await _checkpoints.from_journal(hub, trial, record["body"], record["time"])
    elif record["kind"] == "metadata":
        metadata = dict(record["body"]["metadata"])
        await hub.store.write(lambda conn: trials.set_metadata(conn, trial.id, metadata))
    else:
        await hub.actor.do(lambda tx: _act(hub, tx, trial.id, record))


def telling(trial: LiveTrial, records: Sequence[Mapping[str, Any]], *, last_will: bool) -> list[Mapping[str, Any]]:
    """The records that matter; of progress and status only the last."""
    kinds = set(_ACTS) | ({"checkpoint", "metadata"} if last_will else set())
    if not last_will:
        kinds -= {"operation", "preempt", "out_of_operations"}
    validated = goes_by_validations(trial)
    last: dict[str, Mapping[str, Any]] = {r["kind"]: r for r in records if r.get("kind") in ("progress", "status")}
    return [
        r
        for r in records
        if (r["kind"] == "metrics" and validated and r["group"] == VALIDATION)
        or (r["kind"] in kinds and last.get(r["kind"], r) is r)
    ]


def goes_by_validations(trial: LiveTrial) -> bool:
    """Whether a trial's search is told its validations."""
    search, spec = trial.experiment.search, trial.experiment.spec
    if search is None or trial.reopened or Validated.kind not in search.event_kinds:
        return False
    return spec.time_metric is not None or bool(spec.searcher.get("class"))


async def catch_up(hub: Hub, trial: LiveTrial) -> None:
    """Tell a search the validations of its trial that are kept, and that it has not seen."""
    metric = trial.experiment.spec.metric
    found = await hub.store.read(lambda conn: validations(conn, trial.id, metric))
    records = [
        {"kind": "metrics", "group": VALIDATION, "metrics": v.row.metrics, "steps_completed": v.row.steps_completed}
        for v in found
    ]
    if records:
        await steer(hub, trial.id, f"run {trial.run_id}", records, last_will=False)


def _act(hub: Hub, tx: Transaction, trial_id: int, record: Mapping[str, Any]) -> None:
    trial = hub.live.trials.get(trial_id)
    if trial is None:
        return
    if record["kind"] == "metrics":
        validated(hub, tx, trial, record["metrics"], record["steps_completed"])
    else:
        _ACTS[record["kind"]](hub, tx, trial, record["body"])


def validated(hub: Hub, tx: Transaction, trial: LiveTrial, values: Mapping[str, Any], steps: int | None) -> None:
    """Tell a search a validation of its trial, each step once."""
    spec = trial.experiment.spec
    if not goes_by_validations(trial):
        return
    metric = _value(values, spec.metric)
    step = steps if spec.time_metric is None else _value(values, spec.time_metric)
    if metric is None or step is None or not -1 < step < 2**63:
        if spec.time_metric is not None:
            missing = spec.metric if metric is None else spec.time_metric
            _ending.fail(hub, tx, trial.experiment, f"trial {trial.id}: a validation has no number {missing!r}")
    elif int(step) > trial.validated:
        trial.validated = int(step)
        tx.write(trials.change, trial.id, validated=trial.validated)
        trial.experiment.pending.append(Validated(trial.request_id, int(step), metric))
        hub.live.touch(trial.experiment)


def _value(values: Mapping[str, Any], name: str) -> float | None:
    found = number(values, name)
    return _operations.as_number(values.get(name)) if found is None else found


def _operation(hub: Hub, tx: Transaction, trial: LiveTrial, body: Mapping[str, Any]) -> None:
    metric = _operations.as_number(body["searcher_metric"])
    if metric is not None:
        _operations.completed(hub, tx, trial, int(body["length"]), metric)


def _acknowledged(hub: Hub, tx: Transaction, trial: LiveTrial, body: Mapping[str, Any]) -> None:
    if trial.allocation is not None and body.get("acknowledged", True):
        _allocations.acknowledge(hub, tx, trial.allocation)


def _out_of_operations(hub: Hub, tx: Transaction, trial: LiveTrial, body: Mapping[str, Any]) -> None:
    if trial.allocation is not None:
        trial.allocation.idle = True  # it was told so, or it would not have said this
    _acknowledged(hub, tx, trial, body)


def _gave_up(hub: Hub, tx: Transaction, trial: LiveTrial, body: Mapping[str, Any]) -> None:
    reason = _operations.REASONS.get(str(body["reason"]).removeprefix("EXITED_REASON_"))
    if reason is not None:
        _operations.gave_up(hub, tx, trial, reason)


def _progressed(hub: Hub, tx: Transaction, trial: LiveTrial, body: Mapping[str, Any]) -> None:
    if "fraction" in body:
        _operations.progressed(tx, trial, float(body["fraction"]), is_raw=True)
    else:
        _operations.progressed(tx, trial, float(body["units"]), is_raw=False)


def _status(hub: Hub, tx: Transaction, trial: LiveTrial, body: Mapping[str, Any]) -> None:
    tx.write(trials.change, trial.id, status=str(body["status"]))


_ACTS: dict[str, Callable[[Any, Any, Any, Mapping[str, Any]], None]] = {
    "operation": _operation,
    "preempt": _acknowledged,
    "out_of_operations": _out_of_operations,
    "early_exit": _gave_up,
    "progress": _progressed,
    "status": _status,
}
