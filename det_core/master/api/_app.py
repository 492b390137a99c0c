"""The application: all routes, and what goes wrong as the wire contract's error bodies (§2.2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import det_core
from det_core._json import dump
from det_core.errors import StoreConflict, StoreError
from det_core.master._errors import MasterError
from det_core.master.api import _checkpoints, _experiments, _logs, _master, _metrics, _trials
from det_core.master.api._auth import Authenticator, OwnHosts
from det_core.master.api._routing import MAX_BODY_BYTES, BodiesInFlight, Routes
from det_core.master.api._types import answer
from det_core.master.service import ServiceState

LOG = logging.getLogger("det_core.master")
ROUTES: tuple[Routes, ...] = (
    _metrics.routes,
    _trials.routes,
    _logs.routes,
    _checkpoints.routes,
    _experiments.routes,
    _logs.plain_routes,
    _master.routes,
    _master.plain_routes,
)
"""Routes by subject; the most frequent requests come first."""
_REASONS = {
    3: "InvalidArgument",
    5: "NotFound",
    6: "AlreadyExists",
    7: "PermissionDenied",
    8: "ResourceExhausted",
    9: "FailedPrecondition",
    12: "Unimplemented",
    13: "Internal",
    14: "Unavailable",
    16: "Unauthenticated",
}
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 413: 8, 501: 12, 503: 14}


def create_app(
    service: ServiceState, user_token: str, *, max_body_bytes: int = MAX_BODY_BYTES, hosts: Iterable[str] = ()
) -> FastAPI:
    """Return the HTTP API of a master, an ASGI application.

    Args:
        service: Service that does the work.
        user_token: Token of the user.
        max_body_bytes: Bytes that the body of a request may have.
        hosts: Names by which the master is reached, beside localhost and that of its machine.
    """
    app = FastAPI(
        title="det_core master",
        version=det_core.__version__,
        description="The HTTP API of a master.",
        # A redirect would drop the body of a POST in some clients.
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
    app.state.max_body_bytes = max_body_bytes
    app.state.bodies_in_flight = BodiesInFlight()
    app.state.own_hosts = OwnHosts(hosts)
    for routes in ROUTES:
        routes.add_to(app)
    for kind in (MasterError, StoreError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an error. Of a request that meets an error of the database, nothing was kept."""
    path = request.url.path
    if isinstance(error, MasterError):
        return _refusal(request, error.status, error.code, str(error))
    if isinstance(error, StoreConflict):
        return _refusal(request, 409, 6, str(error))
    if isinstance(error, StoreError):
        LOG.error("%s %s: %s", request.method, path, error)
        return _refusal(request, 503, 14, str(error))
    if isinstance(error, RequestValidationError):
        return _refusal(request, 400, 3, _explain(error.errors()))
    if not isinstance(error, HTTPException):  # a defect of ours; the log of the server gets the whole of it
        return _refusal(request, 500, 13, f"the master failed: {type(error).__name__}: {error}")
    status = error.status_code
    text = str(error.detail)
    # As the wire contract has it (§2.2): a route that is not there is not implemented.
    if status == 404 and path.startswith("/api/"):
        status = 501
        text = f"there is no {request.method} {path} here"
    elif status == 405:
        text = f"{path} does not take {request.method}"
    return _refusal(request, status, _CODES.get(status, 13), text, error.headers)


def _refusal(request: Request, status: int, code: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    sent = dict(headers or {})
    if getattr(request.state, "is_refused", False):
        sent["Connection"] = "close"  # the rest of the body is not read
    if status == 503:
        sent["Retry-After"] = "1"
    body: dict[str, Any] = {"message": text}
    if request.url.path.startswith("/api/"):
        body = {"error": {"code": code, "reason": _REASONS.get(code, "Unknown"), "error": text}}
    return Response(dump(body), status, sent, "application/json")


def _explain(errors: Iterable[Any]) -> str:
    """Return all problems of a request, one a line: where it is, and what was expected."""
    lines = []
    for error in errors:
        where, *path = error["loc"] or ("request",)
        place = f"{where} {'.'.join(map(str, path))}".rstrip()
        text = error["msg"]
        if error["type"] == "json_invalid":
            text = f"no JSON: {error.get('ctx', {}).get('error', text)}"
        lines.append(f"{place}: {text}")
    return "\n".join(dict.fromkeys(lines))
