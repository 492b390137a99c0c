"""Routes of an allocation: preemption and rendezvous (rows 14 to 16 and 20 to 26 of §4; §6)."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query
from fastapi.responses import Response

from det_core._clock import monotonic
from det_core.master._errors import Stopping
from det_core.master.api._routing import LONGEST_WAIT, Routes, ThePendingRequests, TheService
from det_core.master.api._types import answer, done
from det_core.master.service import _allocations

routes = Routes("allocations")
PAUSE = 2.0
"""Time before a poll of an allocation that has ended is answered, in seconds: a script must not spin."""


@routes.trial.get("/allocations/{allocation_id}/signals/preemption")
async def preemption(
    allocation_id: str,
    service: TheService,
    pending: ThePendingRequests,
    timeout_seconds: Annotated[float, Query(ge=0)] = LONGEST_WAIT,
) -> Response:
    """Answer whether the allocation must save and stop: once it must, or after the timeout (at most a minute)."""
    timeout = min(timeout_seconds, LONGEST_WAIT)
    try:
        preempt = await pending.wait(_poll(service, allocation_id, timeout))
    except Stopping:  # the server stops, the trial goes on
        preempt = False
    return answer({"preempt": preempt})


async def _poll(service: TheService, allocation_id: str, timeout: float) -> bool:
    began = monotonic()
    preempt = await _allocations.poll(service, allocation_id, timeout)
    if not preempt and monotonic() - began < timeout / 2:  # it has ended
        await asyncio.sleep(min(timeout, PAUSE))
    return preempt


@routes.trial.post("/allocations/{allocation_id}/signals/ack_preemption")
async def ack_preemption(allocation_id: str, service: TheService) -> Response:
    """Acknowledge a preemption: the process is saving, and will exit."""
    await _allocations.acknowledge(service, allocation_id)
    return done()


@routes.trial.post("/allocations/{allocation_id}/signals/pending_preemption")
async def pending_preemption(allocation_id: str, service: TheService) -> Response:
    """Preempt the allocation, because its machine is taken back."""
    await _allocations.pending(service, allocation_id)
    return done()


@routes.trial.get("/allocations/{allocation_id}/resources/{resources_id}/rendezvous")
async def rendezvous(allocation_id: str, resources_id: str, service: TheService) -> Response:
    """Return where the allocation's containers are."""
    view = await _allocations.rendezvous(service, allocation_id)
    return answer({"rendezvousInfo": view})


@routes.trial.post("/allocations/{allocation_id}/all_gather")
@routes.trial.post("/allocations/{allocation_id}/notify_container_running")
@routes.trial.post("/allocations/{allocation_id}/acceleratorData")
@routes.trial.post("/allocations/{allocation_id}/proxy_address")
@routes.trial.post("/allocations/{allocation_id}/resources/{resources_id}/daemon")
@routes.trial.post("/allocations/{allocation_id}/ready")
@routes.trial.post("/allocations/{allocation_id}/waiting")
async def accept(allocation_id: str) -> Response:
    """Accept what containers on other schedulers agree on, and keep nothing: this engine runs one container."""
    return done()
