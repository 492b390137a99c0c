"""Who runs now: the scheduler's decision, carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core.master.scheduler import Running, decide
from det_core.master.service import _allocations, _trials

if TYPE_CHECKING:
    from det_core.master.service._actor import Transaction
    from det_core.master.service._hub import Hub
    from det_core.master.service._live import LiveAllocation


def schedule(hub: Hub, tx: Transaction) -> None:
    """Start those whose turn it is, and ask those to stop who hold up a higher priority."""
    live = hub.live
    if not live.wanting:
        return
    running = [_running(allocation) for allocation in live.allocations.values()]
    wanting = [trial.wanting for trial in live.wanting.values() if trial.wanting is not None]
    decision = decide(running, wanting, hub.engine.slots)
    for start in decision.start:
        _allocations.begin(hub, tx, live.trials[start.wanting.trial_id], start.slot_ids)
    for victim in decision.preempt:
        _allocations.ask_to_stop(hub, tx, live.allocations[victim.allocation_id], "one of a higher priority waits")


def reprioritise(hub: Hub, experiment_id: int) -> None:
    """The priority of an experiment has changed: its trials wait under the new one."""
    for trial in list(hub.live.wanting.values()):
        if trial.experiment.id == experiment_id:
            _trials.want(hub, trial)


def _running(allocation: LiveAllocation) -> Running:
    trial = allocation.trial
    return Running(
        allocation_id=allocation.id,
        experiment_id=trial.experiment.id,
        trial_id=trial.id,
        slot_ids=allocation.slot_ids,
        priority=trial.experiment.priority,
        ending=allocation.ending,
    )
