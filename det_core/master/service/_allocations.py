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
from det_core.master.service._live import Launch, LiveAllocation
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
        slots=allocation.row.slots,
        slot_ids=tuple(allocation.row.slot_ids),
        priority=trial.experiment.row.priority,
        ending=allocation.ending,
        queued=queues and not allocation.ready,
    )


def begin(service: ServiceState, tx: Transaction, placement: Placement) -> None:
    """Begin the allocation of a trial whose turn it is."""
    trial = service.live.trials[placement.pending.trial_id]
    slots = placement.pending.slots
    tx.change(trial.row, run_id=trial.row.run_id + 1)
    # The code goes into the ticket alone; the database keeps its hash.
    code = secrets.token_urlsafe(16)
    launch = Launch(hash_secret(code), service.engine.pool.count_nodes(slots))
    row = models.Allocation(
        id=placement.pending.allocation_id,
        trial_id=trial.id,
        run_id=trial.row.run_id,
        state="RUNNING",
        slots=slots,
        slot_ids=list(placement.slot_ids),
        latest_checkpoint=trial.row.warm_start,
        facts=launch.facts(),
    )
    trial.allocation = service.live.allocations[row.id] = LiveAllocation(row, trial, launch)
    service.live.queue.pop(trial.id, None)
    trial.queued = None
    tx.add(row)
    # In the transaction, as a checkpoint may be reported until then.
    tx.write(_set_start, row)
    tx.publish(("trial", trial.id))
    # A master that dies before it finds the row at its next start, and the engine reports that nothing began.
    tx.then(service.runner.launch, row.id, code)


def _set_start(session: Session, row: models.Allocation) -> None:
    """Have an allocation start from the latest checkpoint of its trial, if there is one."""
    latest = checkpoints.latest(session, row.trial_id)
    if latest is not None:
        row.latest_checkpoint = latest.uuid
        row.steps_completed = latest.steps_completed
        start = {"latest_checkpoint": latest.uuid, "steps_completed": latest.steps_completed}
        change(session, models.Allocation, row.id, **start)


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
    tx.change(allocation.row, facts={**allocation.row.facts, **launch.facts()})
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
    # Nobody is there yet who could save.
    if not allocation.ready:
        kill(service, tx, allocation, reason)
        return
    tx.change(allocation.row, preempt_time=_clock.now(), preempt_reason=reason)
    tx.publish(("allocation", allocation.id), ("trial", allocation.trial.id))
    # After the commit: a script that stops for a preemption which was not recorded would have failed.
    tx.then(_announce, service, allocation.id)
    tx.then(service.runner.terminate, allocation.id, allocation.trial.experiment.spec.preemption_timeout)


def _announce(service: ServiceState, allocation_id: str) -> None:
    """Let the processes of an allocation learn of its preemption, which is recorded."""
    allocation = service.live.allocations.get(allocation_id)
    if allocation is not None:
        allocation.is_preempted = True


def kill(service: ServiceState, tx: Transaction, allocation: LiveAllocation, reason: str) -> None:
    """End an allocation now."""
    if allocation.row.kill_time is None:
        tx.change(allocation.row, kill_time=_clock.now(), kill_reason=reason)
        tx.publish(("trial", allocation.trial.id))
    # Also for a repeat: an earlier order may not have reached the engine.
    tx.then(service.runner.kill, allocation.id)


def acknowledged(service: ServiceState, tx: Transaction, allocation: LiveAllocation) -> None:
    """Note that an allocation is about to exit.

    One that has nothing left to do, or got that answer, is held to it: what its search wants of it meanwhile is for its
    next allocation, whose need does not count as a failure.
    """
    if not allocation.row.acked:
        tx.change(allocation.row, acked=True)
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
    return RendezvousView(addresses=["127.0.0.1"], rank=0, slots=[allocation.row.slots])
