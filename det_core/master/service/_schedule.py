"""Placement of allocations: the scheduler's decisions, carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core.master.scheduler import RunningAllocation, decide
from det_core.master.service import _allocations, _trials

if TYPE_CHECKING:
    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveAllocation
    from det_core.master.service._state import ServiceState


def schedule(hub: ServiceState, tx: Transaction) -> None:
    """Start the allocations whose turn it is, and ask those to stop that hold up a higher priority."""
    live = hub.live
    if not live.queue:
        return
    running = [_running(allocation, queues=hub.engine.pool.queues) for allocation in live.allocations.values()]
    pending = [trial.queued for trial in live.queue.values() if trial.queued is not None]
    decision = decide(running, pending, hub.engine.pool)
    for placement in decision.start:
        _allocations.begin(hub, tx, placement)
    for victim in decision.preempt:
        _allocations.ask_to_stop(hub, tx, live.allocations[victim.allocation_id], "one of a higher priority waits")


def reprioritise(hub: ServiceState, experiment_id: int) -> None:
    """Queue the waiting trials of an experiment anew, under its changed priority."""
    for trial in list(hub.live.queue.values()):
        if trial.experiment.id == experiment_id:
            _trials.enqueue(hub, trial)


def _running(allocation: LiveAllocation, *, queues: bool) -> RunningAllocation:
    trial = allocation.trial
    return RunningAllocation(
        allocation_id=allocation.id,
        experiment_id=trial.experiment.id,
        trial_id=trial.id,
        slots=allocation.slots,
        slot_ids=allocation.slot_ids,
        priority=trial.experiment.priority,
        ending=allocation.ending,
        queued=queues and not allocation.ready,
    )
