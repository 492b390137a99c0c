"""What route functions take beside the request: the service, and the waits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from starlette.requests import Request as PlainRequest
from starlette.responses import Response
from starlette.types import Receive, Scope

from det_core.master.api._auth import Gate
from det_core.master.api._wait import Waits
from det_core.master.service import Service


class _JsonRequest(PlainRequest):
    """A request whose JSON is read by orjson: no surrogates alone, no NaN, and fast."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler


def new_router(*tags: str) -> APIRouter:
    """A router for the routes of one subject."""
    return APIRouter(tags=list(tags), route_class=_JsonRoute)


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _waits(request: Request) -> Waits:
    found: Waits = request.app.state.waits
    return found


async def _gate(request: Request) -> Gate:
    found: Gate = request.app.state.gate
    return found


TheService = Annotated[Service, Depends(_service)]
TheWaits = Annotated[Waits, Depends(_waits)]
TheGate = Annotated[Gate, Depends(_gate)]
