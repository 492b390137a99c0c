"""Routes of a search method that runs elsewhere (row 36 of §4; §12.8)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import Field

from det_core.master.api._auth import ByUser
from det_core.master.api._context import TheService, TheWaits, new_router
from det_core.master.api._control import LONGEST_WAIT
from det_core.master.api._types import Body, Empty, ExperimentId, Int64, Reply, answer, done

router = new_router("custom search")


class SearcherEventsReply(Reply):
    """What has happened: each event an id, and one more key that names its kind."""

    searcher_events: list[dict[str, Any]]


class Trigger(Body):
    """The event that is answered, by its id."""

    id: Int64


class SearcherOperationsRequest(Body):
    """What is to happen, and the event that it answers; that one and those before it are done with then."""

    triggered_by_event: Trigger | None = None
    searcher_operations: list[dict[str, Any]] = Field(default_factory=list)


@router.get("/api/v1/experiments/{experiment_id}/searcher_events", response_model=SearcherEventsReply)
async def searcher_events(
    request: Request,
    experiment_id: ExperimentId,
    service: TheService,
    waits: TheWaits,
    _: ByUser,
    timeout_seconds: Annotated[float, Query(ge=0)] = LONGEST_WAIT,
) -> Response:
    """The events not answered yet, as soon as there is one; none after that time (at most a minute)."""
    work = service.searcher_events(experiment_id, min(timeout_seconds, LONGEST_WAIT))
    events = await waits.wait(work, request)
    return answer(SearcherEventsReply(searcher_events=[{"id": e["id"], **e["event"]} for e in events]))


@router.post("/api/v1/experiments/{experiment_id}/searcher_operations", response_model=Empty)
async def searcher_operations(
    experiment_id: ExperimentId, body: SearcherOperationsRequest, service: TheService, _: ByUser
) -> Response:
    """Take what the search method decided."""
    trigger = body.triggered_by_event
    await service.searcher_operations(experiment_id, None if trigger is None else trigger.id, body.searcher_operations)
    return done()
