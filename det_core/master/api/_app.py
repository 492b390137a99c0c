"""The application: all routes behind the door, and their description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

import det_core
from det_core.master.api import (
    _alerts,
    _allocations,
    _changes,
    _checkpoints,
    _control,
    _experiments,
    _master,
    _operations,
    _refusals,
    _reports,
    _streams,
    _tasks,
    _trials,
    _unmanaged,
)
from det_core.master.api._auth import Gate
from det_core.master.api._docs import page
from det_core.master.api._door import LIMIT, Door
from det_core.master.api._openapi import describe
from det_core.master.api._wait import Waits
from det_core.master.service import Service

_PARTS = (
    _reports,
    _trials,
    _operations,
    _allocations,
    _streams,
    _checkpoints,
    _experiments,
    _changes,
    _control,
    _tasks,
    _unmanaged,
    _alerts,
    _master,
)
"""The subjects; those that are asked for most come first."""


def create_app(service: Service, user_token: str, *, limit: int = LIMIT) -> FastAPI:
    """The HTTP API of a master.

    Args:
        service: what does all the work.
        user_token: the secret by which the user is known.
        limit: bytes that the body of a request may have.

    Returns:
        An ASGI application. ``app.state.waits.release()`` ends what waits, before the server stops.
    """
    app = FastAPI(
        title="det_core master",
        version=det_core.__version__,
        description=__doc__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    gate, waits = Gate(service, user_token), Waits()
    app.state.service, app.state.gate, app.state.waits = service, gate, waits
    for part in _PARTS:
        app.include_router(part.router)
    app.add_middleware(Door, gate=gate, waits=waits, limit=limit)
    _refusals.install(app)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))

    return app


def _described(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = describe(app)
    return app.openapi_schema
