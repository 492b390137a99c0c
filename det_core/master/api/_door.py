"""The door: what each request passes before it is looked at more closely.

It tells the caller by the token, so that nothing reaches a route unauthenticated; it stops reading a body that grows
beyond the limit, however long it is going to be; and it evens out what the contract lets clients do: bodies are JSON
whatever their content type says, and query parameters are camelCase or snake_case.
"""

from __future__ import annotations

import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from det_core.master._errors import MasterError, Stopping, TooMuch
from det_core.master.api._auth import OPEN, Caller, Gate
from det_core.master.api._refusals import refuse
from det_core.master.api._wait import Waits

LIMIT = 128 << 20
"""Bytes that the body of a request may have (§2.2)."""
_JSON = (b"content-type", b"application/json")
_HUMP = re.compile(r"(?<=[a-z0-9])([A-Z])")


class Door:
    """An ASGI application in front of ``app``.

    Args:
        app: what gets the requests that pass.
        gate: who tells callers.
        waits: whether the server is about to stop.
        limit: bytes that a body may have.
    """

    def __init__(self, app: ASGIApp, gate: Gate, waits: Waits, limit: int = LIMIT) -> None:
        self._app = app
        self._gate = gate
        self._waits = waits
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope = await self._checked(scope)
        except MasterError as e:
            response = refuse(scope["path"], e)
            response.headers["Connection"] = "close"  # what is still to come of a body is not read
            await response(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    async def _checked(self, scope: Scope) -> Scope:
        if self._waits.released:
            raise Stopping("the master is about to stop; try again in a moment")
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        caller = Caller() if (scope["method"], scope["path"]) in OPEN else None
        if caller is None:
            caller = await self._gate.admit(headers, _cookies(headers.get("cookie", "")))
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_much()
        kept = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
        return {**scope, "headers": [*kept, _JSON], "query_string": _snake(scope["query_string"]), "caller": caller}

    def _bounded(self, receive: Receive) -> Receive:
        came = 0

        async def bounded() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._limit:
                raise HTTPException(413, str(self._too_much()), {"Connection": "close"})
            return message

        return bounded

    def _too_much(self) -> TooMuch:
        return TooMuch(f"the request has more than {self._limit >> 20} MiB, which is what the master takes at once")


def _cookies(header: str) -> dict[str, str]:
    if not header:
        return {}
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _snake(query: bytes) -> bytes:
    """Query parameters with their names in snake_case."""
    if query.lower() == query:
        return query
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return urlencode([(_HUMP.sub(r"_\1", name).lower(), value) for name, value in pairs]).encode("latin-1")
