"""Routes of an allocation: preemption, and what its containers agree on (rows 14 to 16 and 20 to 26 of §4; §6)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import Response
from pydantic import Field

from det_core._clock import monotonic
from det_core.master._errors import Stopping
from det_core.master.api._pending import LONGEST_WAIT
from det_core.master.api._routing import Routes, ThePendingRequests, TheService
from det_core.master.api._types import INT32, Body, Empty, Reply, answer, done

routes = Routes("allocations")
PAUSE = 2.0
"""Seconds until an allocation that has ended hears so again, lest what asks for it spins."""


class PreemptionReply(Reply):
    """Whether to save and stop."""

    preempt: bool


class GatherRequest(Body):
    """One peer, told from the others by ``request_uuid``, and what it has for them."""

    request_uuid: str
    num_peers: Annotated[int, Field(ge=1, le=INT32)]
    data: dict[str, Any] = Field(default_factory=dict)


class RunningRequest(GatherRequest):
    """A container that runs."""

    rank: int = 0
    node_name: str = ""


class GatherReply(Reply):
    """What all peers have sent."""

    data: list[dict[str, Any]]


class RendezvousInfo(Reply):
    """Where the peers are, in the order of their ranks; the caller's rank; their slots."""

    addresses: list[str]
    rank: int
    slots: list[int]


class RendezvousReply(Reply):
    """Where the peers are."""

    rendezvous_info: RendezvousInfo


class AcceleratorRequest(Body):
    """What accelerators a container has."""

    accelerator_data: dict[str, Any] = Field(default_factory=dict)


class ProxyRequest(Body):
    """Where a container is reached."""

    proxy_address: str = ""


@routes.trial.get("/allocations/{allocation_id}/signals/preemption", response_model=PreemptionReply)
async def preemption(
    allocation_id: str,
    service: TheService,
    pending: ThePendingRequests,
    timeout_seconds: Annotated[float, Query(ge=0)] = LONGEST_WAIT,
) -> Response:
    """Whether the allocation is to save and stop: as soon as it is, or after that time (at most a minute)."""
    timeout = min(timeout_seconds, LONGEST_WAIT)
    try:
        preempt = await pending.wait(_preemption(service, allocation_id, timeout))
    except Stopping:  # the server stops, the trial goes on
        preempt = False
    return answer(PreemptionReply(preempt=preempt))


async def _preemption(service: TheService, allocation_id: str, timeout: float) -> bool:
    began = monotonic()
    preempt = await service.preemption(allocation_id, timeout)
    if not preempt and monotonic() - began < timeout / 2:  # it has ended
        await asyncio.sleep(min(timeout, PAUSE))
    return preempt


@routes.trial.post("/allocations/{allocation_id}/signals/ack_preemption", response_model=Empty)
async def ack_preemption(allocation_id: str, service: TheService) -> Response:
    """The process has noticed, is saving, and will exit."""
    await service.ack_preemption(allocation_id)
    return done()


@routes.trial.post("/allocations/{allocation_id}/signals/pending_preemption", response_model=Empty)
async def pending_preemption(allocation_id: str, service: TheService) -> Response:
    """Whoever lent the machine wants it back."""
    await service.pending_preemption(allocation_id)
    return done()


@routes.trial.get("/allocations/{allocation_id}/resources/{resources_id}/rendezvous", response_model=RendezvousReply)
async def rendezvous(
    allocation_id: str, resources_id: str, service: TheService, pending: ThePendingRequests
) -> Response:
    """Where all containers of the allocation are, once all have started."""
    view = await pending.wait(service.rendezvous(allocation_id, resources_id))
    return answer(RendezvousReply(rendezvous_info=RendezvousInfo(**view)))


@routes.trial.post("/allocations/{allocation_id}/all_gather", response_model=GatherReply)
async def all_gather(
    allocation_id: str, body: GatherRequest, service: TheService, pending: ThePendingRequests
) -> Response:
    """What each of ``numPeers`` has sent, once all have."""
    work = service.all_gather(allocation_id, body.request_uuid, body.num_peers, body.data)
    return answer(GatherReply(data=await pending.wait(work)))


@routes.trial.post("/allocations/{allocation_id}/notify_container_running", response_model=GatherReply)
async def notify_container_running(allocation_id: str, body: RunningRequest, service: TheService) -> Response:
    """Note that a container runs."""
    data = await service.notify_container_running(allocation_id, body.request_uuid, body.num_peers, body.data)
    return answer(GatherReply(data=data))


@routes.trial.post("/allocations/{allocation_id}/acceleratorData", response_model=Empty)
async def accelerator_data(allocation_id: str, body: AcceleratorRequest, service: TheService) -> Response:
    """Note what accelerators a container has."""
    await service.accelerator_data(allocation_id, body.accelerator_data)
    return done()


@routes.trial.post("/allocations/{allocation_id}/proxy_address", response_model=Empty)
async def proxy_address(allocation_id: str, body: ProxyRequest, service: TheService) -> Response:
    """Note where a container is reached."""
    await service.proxy_address(allocation_id, body.proxy_address)
    return done()


@routes.trial.post("/allocations/{allocation_id}/resources/{resources_id}/daemon", response_model=Empty)
async def daemon(allocation_id: str, resources_id: str, service: TheService) -> Response:
    """This container may be killed when the others are done."""
    await service.daemon(allocation_id, resources_id)
    return done()


@routes.trial.post("/allocations/{allocation_id}/ready", response_model=Empty)
async def ready(allocation_id: str, service: TheService) -> Response:
    """The allocation is ready."""
    await service.ready(allocation_id)
    return done()


@routes.trial.post("/allocations/{allocation_id}/waiting", response_model=Empty)
async def waiting(allocation_id: str, service: TheService) -> Response:
    """The allocation waits."""
    await service.waiting(allocation_id)
    return done()
