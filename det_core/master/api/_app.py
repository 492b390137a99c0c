"""The application: all routes, and their description."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastapi import FastAPI
from fastapi.responses import Response

import det_core
from det_core.master.api import (
    _allocations,
    _checkpoints,
    _experiments,
    _logs,
    _master,
    _metrics,
    _refusals,
    _trials,
)
from det_core.master.api._auth import Authenticator, OwnHosts
from det_core.master.api._routing import MAX_BODY_BYTES, BodiesInFlight, PendingRequests, Routes
from det_core.master.api._types import answer
from det_core.master.service import ServiceState

ROUTES: tuple[Routes, ...] = (
    _metrics.routes,
    _trials.routes,
    _allocations.routes,
    _logs.routes,
    _checkpoints.routes,
    _experiments.routes,
    _logs.plain_routes,
    _master.routes,
    _master.plain_routes,
)
"""Routes by subject; the most frequent requests come first."""


def create_app(
    service: ServiceState, user_token: str, *, max_body_bytes: int = MAX_BODY_BYTES, hosts: Iterable[str] = ()
) -> FastAPI:
    """Return the HTTP API of a master, an ASGI application.

    Args:
        service: service that does the work.
        user_token: token of the user.
        max_body_bytes: bytes that the body of a request may have.
        hosts: names by which the master is reached, beside localhost and that of its machine.

    Returns:
        The application. ``app.state.pending.release()`` ends the requests that wait, before the server stops.
    """
    app = FastAPI(
        title="det_core master",
        version=det_core.__version__,
        description=__doc__,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )

    async def describe() -> Response:
        """Answer the description of the API, which takes 0.2 s to make once."""
        return answer(await asyncio.to_thread(app.openapi))

    app.add_api_route("/openapi.json", describe, include_in_schema=False)
    app.state.service = service
    app.state.authenticator = Authenticator(service, user_token)
    app.state.pending = PendingRequests()
    app.state.max_body_bytes = max_body_bytes
    app.state.bodies_in_flight = BodiesInFlight()
    app.state.own_hosts = OwnHosts(hosts)
    for routes in ROUTES:
        routes.add_to(app)
    _refusals.install(app)
    return app
