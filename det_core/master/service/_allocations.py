"""Allocations: begin, preempt, kill, and what their processes ask (§5.6, §6). All is stored before it is done."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, TypedDict

from det_core import _clock
from det_core.master._errors import NotFound
from det_core.master.scheduler import RunningAllocation, decide
from det_core.master.service._access import hash_secret, live_allocation
from det_core.master.service._live import LiveAllocation
from det_core.master.store import change, checkpoints, models

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.engines import Moved, Notice
    from det_core.master.scheduler import Placement
    from det_core.master.service._actor import Transaction
    from det_core.master.service._state import ServiceState

LOG = logging.getLogger("det_core")
UNKNOWN_PAUSE = 1.0
"""Seconds that somebody waits for the answer that an allocation does not exist, lest it asks again at once."""


def schedule(service: ServiceState, tx: Transaction) -> None:
    """Begin the allocations whose turn it is, and preempt those that block a higher priority."""
    live = service.live
    if not live.queue:
        return
    running = [_running(allocation, queues=service.engine.pool.queues) for allocation in live.allocations.values()]
    pending = [trial.queued for trial in live.queue.values() if trial.queued is not None]
    decision = decide(running, pending, service.engine.pool)
    for placement in decision.start:
        begin(service, tx, placement)
    for victim in decision.preempt:
        ask_to_stop(service, tx, live.allocations[victim.allocation_id], "one of a higher priority waits")


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


def begin(service: ServiceState, tx: Transaction, placement: Placement) -> None:
    """Begin the allocation of a trial whose turn it is."""
    trial = service.live.trials[placement.pending.trial_id]
    slots = placement.pending.slots
    slot_ids = placement.slot_ids
    trial.run_id += 1
    allocation = LiveAllocation(f"{trial.task_id}.{trial.run_id}", trial, trial.run_id, slots, slot_ids)
    trial.allocation = service.live.allocations[allocation.id] = allocation
    service.live.queue.pop(trial.id, None)
    trial.queued = None
    code = secrets.token_urlsafe(16)
    allocation.launch.code = hash_secret(code)
    allocation.launch.nodes = service.engine.pool.count_nodes(slots)
    trial_id = trial.id
    warm_start = trial.warm_start

    def write(session: Session) -> None:
        latest = checkpoints.latest(session, trial_id)
        if latest is None:
            allocation.latest_checkpoint = warm_start
        else:
            allocation.latest_checkpoint = latest.uuid
            allocation.steps_completed = latest.steps_completed
        row = models.Allocation(
            id=allocation.id,
            trial_id=trial_id,
            run_id=allocation.run_id,
            state="RUNNING",
            slots=slots,
            slot_ids=list(slot_ids),
            steps_completed=allocation.steps_completed,
            latest_checkpoint=allocation.latest_checkpoint,
            facts=allocation.launch.facts(),
        )
        session.add(row)
        change(session, models.Trial, trial_id, run_id=allocation.run_id)

    tx.write(write)
    tx.publish(("trial", trial.id))
    tx.then(service.runner.launch, allocation.id, code)


def move(service: ServiceState, event: Moved, tx: Transaction) -> None:
    """Note how far the cluster got with an allocation."""
    allocation = service.live.allocations.get(event.allocation_id)
    if allocation is None:
        return
    launch = allocation.launch
    launch.phase = event.phase
    launch.ref = event.ref or launch.ref
    launch.nodes = event.nodes or launch.nodes
    LOG.info("allocation %s: %s %s", allocation.id, event.phase, event.detail)
    tx.write(change, models.Allocation, allocation.id, facts=launch.facts())
    tx.publish(("trial", allocation.trial.id))


def heed(service: ServiceState, event: Notice, tx: Transaction) -> None:
    """Have an allocation save and stop before it is ended from outside; its trial runs again."""
    allocation = service.live.allocations.get(event.allocation_id)
    if allocation is not None:
        ask_to_stop(service, tx, allocation, f"{event.why}, in {event.seconds:.0f} s")


def ask_to_stop(service: ServiceState, tx: Transaction, allocation: LiveAllocation, reason: str) -> None:
    """Have an allocation save and stop; it is killed when its preemption timeout is over. Not ready: killed at once."""
    if allocation.ending:
        return
    if not allocation.ready:
        kill(service, tx, allocation, reason)
        return
    allocation.preempt_time = _clock.now()
    tx.write(change, models.Allocation, allocation.id, preempt_time=allocation.preempt_time, preempt_reason=reason)
    tx.publish(("allocation", allocation.id), ("trial", allocation.trial.id))
    tx.then(_announce, service, allocation.id)
    tx.then(service.runner.terminate, allocation.id, allocation.trial.experiment.spec.preemption_timeout)


def _announce(service: ServiceState, allocation_id: str) -> None:
    """Let the processes of an allocation learn of its preemption, which is recorded."""
    allocation = service.live.allocations.get(allocation_id)
    if allocation is not None:
        allocation.is_preempted = True


def kill(service: ServiceState, tx: Transaction, allocation: LiveAllocation, reason: str) -> None:
    """End an allocation now."""
    if allocation.kill_time is None:
        allocation.kill_time = _clock.now()
        tx.write(change, models.Allocation, allocation.id, kill_time=allocation.kill_time, kill_reason=reason)
        tx.publish(("trial", allocation.trial.id))
    tx.then(service.runner.kill, allocation.id)


def acknowledged(service: ServiceState, tx: Transaction, allocation: LiveAllocation) -> None:
    """Note that an allocation is about to exit.

    One that has nothing left to do, or was told so, is held to it: what its search wants of it meanwhile is for its
    next allocation, whose need does not count as a failure.
    """
    if not allocation.acked:
        allocation.acked = True
        tx.write(change, models.Allocation, allocation.id, acked=True)
        if allocation.idle or not allocation.trial.pending:
            ask_to_stop(service, tx, allocation, "it has nothing left to do")


class RendezvousView(TypedDict):
    """Addresses of the peers of an allocation, in the order of their ranks (§6)."""

    addresses: list[str]
    rank: int
    slots: list[int]


async def poll(service: ServiceState, allocation_id: str, timeout: float) -> bool:
    """Return whether an allocation is to stop, as soon as it is, or after ``timeout`` seconds.

    A poll during which the allocation ends returns True, a later one False: stock clients poll in a loop.

    Raises:
        NotFound: If no allocation has this ID.
    """
    allocation = service.live.allocations.get(allocation_id)
    if allocation is None:
        await know_allocation(service, allocation_id)
        return False
    until = _clock.monotonic() + timeout
    while allocation is not None and not allocation.is_preempted:
        cursor = service.subscriptions.cursor
        if not await service.subscriptions.wait(("allocation", allocation_id), cursor, until - _clock.monotonic()):
            return False
        allocation = service.live.allocations.get(allocation_id)
    return True


async def know_allocation(service: ServiceState, allocation_id: str) -> None:
    """Make sure that there is, or was, such an allocation.

    Raises:
        NotFound: there never was.
    """
    if allocation_id in service.live.allocations:
        return
    row = await service.store.read(lambda session: session.get(models.Allocation, allocation_id))
    if row is None:
        await asyncio.sleep(UNKNOWN_PAUSE)
        raise NotFound(f"allocation {allocation_id} not found")


async def acknowledge(service: ServiceState, allocation_id: str) -> None:
    """Note that the process of an allocation has noticed its preemption and is about to exit."""
    await know_allocation(service, allocation_id)

    def command(tx: Transaction) -> None:
        acknowledged(service, tx, live_allocation(service, allocation_id))

    await service.actor.do(command)


async def pending(service: ServiceState, allocation_id: str) -> None:
    """Have an allocation save and stop because its machine is wanted back; its trial runs again elsewhere."""
    await know_allocation(service, allocation_id)

    def command(tx: Transaction) -> None:
        ask_to_stop(service, tx, live_allocation(service, allocation_id), "its machine is wanted back")

    await service.actor.do(command)


async def rendezvous(service: ServiceState, allocation_id: str) -> RendezvousView:
    """Return the addresses of an allocation's containers: one, because the engine runs it on this machine.

    Raises:
        NotFound: If no allocation has this ID.
        Fenced: If it has ended.
    """
    await know_allocation(service, allocation_id)
    allocation = live_allocation(service, allocation_id)
    return RendezvousView(addresses=["127.0.0.1"], rank=0, slots=[allocation.slots])
