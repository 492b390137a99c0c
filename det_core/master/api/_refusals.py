"""Error bodies of the wire contract (§2.2)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from det_core.errors import StoreConflict, StoreError
from det_core.master._errors import MasterError, Stopping

LOG = logging.getLogger("det_core.master")
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


def refusal(path: str, status: int, code: int, text: str, headers: dict[str, str] | None = None) -> Response:
    """Return the answer that refuses a request.

    Args:
        path: of the request; those outside of ``/api`` have an error body of their own.
        status: of HTTP.
        code: of gRPC.
        text: what happened.
        headers: to send along.
    """
    if not path.startswith("/api/"):
        return JSONResponse({"message": text}, status, headers)
    return JSONResponse(
        {"error": {"code": code, "reason": _REASONS.get(code, "Unknown"), "error": text}}, status, headers
    )


def refuse(path: str, error: MasterError) -> Response:
    """Return the answer for one of the master's own errors."""
    headers = {"Retry-After": "1"} if isinstance(error, Stopping) else None
    return refusal(path, error.status, error.code, str(error), headers)


def install(app: FastAPI) -> None:
    """Have ``app`` answer all errors in this form."""
    app.add_exception_handler(MasterError, _of_master)
    app.add_exception_handler(StoreError, _of_store)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _of_ours)


async def _of_master(request: Request, error: Exception) -> Response:
    assert isinstance(error, MasterError)
    return refuse(request.url.path, error)


async def _of_store(request: Request, error: Exception) -> Response:
    """Answer 409 to a conflict with the record, and 503 if the database failed: then nothing was recorded."""
    if isinstance(error, StoreConflict):
        return refusal(request.url.path, 409, 6, str(error))
    LOG.error("%s %s: %s", request.method, request.url.path, error)
    return refusal(request.url.path, 503, 14, str(error), {"Retry-After": "1"})


async def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return refusal(request.url.path, 400, 3, explain(error.errors()))


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status, text = request.url.path, error.status_code, str(error.detail)
    if status == 404 and path.startswith("/api/"):
        status, text = 501, f"there is no {request.method} {path} here"
    elif status == 405:
        text = f"{path} does not take {request.method}"
    return refusal(path, status, _CODES.get(status, 13), text, dict(error.headers or {}))


async def _of_ours(request: Request, error: Exception) -> Response:
    """Answer 500 to a defect of the master; the server logs its traceback."""
    return refusal(request.url.path, 500, 13, f"the master failed: {type(error).__name__}: {error}")


def explain(errors: Iterable[Any]) -> str:
    """List all mistakes of a request, one a line: where it is, and what was expected."""
    lines = [f"{_place(e['loc'])}: {_said(e)}" for e in errors]
    return "\n".join(dict.fromkeys(lines))


def _place(loc: tuple[Any, ...]) -> str:
    where, *path = loc or ("request",)
    return f"{where} {'.'.join(str(p) for p in path)}" if path else str(where)


def _said(error: Any) -> str:
    if error["type"] == "json_invalid":
        return f"no JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    return str(error["msg"])
