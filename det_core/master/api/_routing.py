"""Routers that say who may call, and what every request passes before its route.

A route admits its caller before the body is read. It also evens out what the contract leaves to clients: bodies are
JSON whatever their content type says, and query parameters are camelCase or snake_case.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode

import orjson
from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from det_core.master._errors import Misdirected, Stopping, TooMuch, Unauthenticated
from det_core.master.api._auth import OBJECT_IDS, Authenticator, Caller
from det_core.master.service import ServiceState

API_PREFIX = "/api/v1"
MAX_BODY_BYTES = 128 << 20
"""Bytes that the body of a request may have (§2.2)."""
MAX_OPEN_BODY_BYTES = 64 << 10
"""Bytes that the body of a request without a token may have."""
MAX_BODY_BYTES_IN_FLIGHT = 512 << 20
"""Bytes of all bodies that are being read or worked on."""
MAX_BYTES_ON_LOOP = 1 << 20
"""Bytes of a body that are parsed where all other requests wait for it, in a few milliseconds."""
LONGEST_WAIT = 60.0
"""Seconds that a request may wait, so that it ends before a proxy in between closes the connection (§2.2)."""
_HUMP = re.compile(r"(?<=[a-z0-9])([A-Z])")


class Routes:
    """Routers of one subject, by who may call.

    Args:
        tag: name of the subject.
        prefix: path that the paths of the routes are relative to.

    Attributes:
        open: routes that need no token.
        user: routes for the user alone.
        trial: routes for the user, and for the trial that is the owner of all objects the path names. A route whose
            path names none takes a parameter ``caller`` and checks the objects in the body itself.
    """

    def __init__(self, tag: str, prefix: str = API_PREFIX) -> None:
        # Only declares the token in the description of the API; _Route checks it.
        token = [Security(HTTPBearer(scheme_name="token", auto_error=False))]
        self.open = APIRouter(prefix=prefix, tags=[tag], route_class=_Route)
        self.user = APIRouter(prefix=prefix, tags=[tag], route_class=_UserRoute, dependencies=token)
        self.trial = APIRouter(prefix=prefix, tags=[tag], route_class=_TrialRoute, dependencies=token)

    def add_to(self, app: FastAPI) -> None:
        """Add all routes to an application."""
        for router in (self.trial, self.user, self.open):
            # include_router() would make each route anew, at the first request: 0.1 s in which no other is answered.
            app.router.routes.extend(router.routes)


class _Route(APIRoute):
    """A route that admits everybody."""

    async def admit(self, request: Request) -> Caller | None:
        """Return the caller, None without a token.

        Raises:
            MasterError: If this route does not admit the caller.
        """
        return None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            request.state.is_refused = True  # until it is admitted
            body = await self._check(request)
            request.state.is_refused = False
            try:
                return await handle(_JsonRequest(_even_out(request.scope), body.receive))
            finally:
                body.release()

        return handler

    async def _check(self, request: Request) -> _Body:
        state = request.app.state
        if state.service.subscriptions.is_closed:
            raise Stopping("the master is about to stop; try again in a moment")
        # Before a byte of the body is read.
        caller = await self.admit(request)
        request.state.caller = caller
        if caller is not None and hasattr(request.state, "connection"):
            request.state.connection.accept_token()
        max_bytes = MAX_OPEN_BODY_BYTES if caller is None else state.max_body_bytes
        body = _Body(request.receive, max_bytes, state.bodies_in_flight)
        length = request.headers.get("content-length", "0")
        # A body that says that it is too large is refused before it is sent.
        if length.isdigit():
            body.check(int(length))
        return body


class _UserRoute(_Route):
    """A route for the user alone."""

    async def admit(self, request: Request) -> Caller:
        caller = await _identify(request)
        caller.check_user()
        return caller


class _TrialRoute(_Route):
    """A route for the user and the trial that owns the objects in the path."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # When the module is imported, so that no route can be published without a check.
        if not OBJECT_IDS & set(self.param_convertors) and "caller" not in inspect.signature(endpoint).parameters:
            raise TypeError(f"{path}: names no object that belongs to a trial, and its function takes no caller")

    async def admit(self, request: Request) -> Caller:
        caller = await _identify(request)
        caller.check(**{name: value for name, value in request.path_params.items() if name in OBJECT_IDS})
        return caller


async def _identify(request: Request) -> Caller:
    authenticator: Authenticator = request.app.state.authenticator
    try:
        return await authenticator.identify(request.headers)
    except Unauthenticated:
        host = request.headers.get("host", "")
        if host not in request.app.state.own_hosts:
            # A page of another name (DNS rebinding) learns nothing but what is public.
            raise Misdirected(
                f"host {host!r} is not a name of this master: send a token, or start it with --allow-host"
            ) from None
        raise


@dataclass
class BodiesInFlight:
    """Bytes of the bodies of all requests that are being read or worked on, and the maximum."""

    max_bytes: int = MAX_BODY_BYTES_IN_FLIGHT
    bytes: int = 0


class _Body:
    """The body of a request, of bounded size, alone and together with all others."""

    def __init__(self, receive: Receive, max_bytes: int, in_flight: BodiesInFlight) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._in_flight = in_flight
        self._received = 0

    def check(self, size: int) -> None:
        """Raise TooMuch if the body may not have that many bytes."""
        if size > self._max_bytes:
            raise TooMuch(f"the request has more than {self._max_bytes >> 10} KiB, the maximum here")

    async def receive(self) -> Message:
        """Return the next message of the server; FastAPI lets nothing but an HTTPException through here."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self._received += size
        self._in_flight.bytes += size
        try:
            self.check(self._received)
        except TooMuch as e:
            # Closed: the rest of the body is not read, and would be taken for the next request.
            raise HTTPException(e.status, str(e), {"Connection": "close"}) from None
        if size and self._in_flight.bytes > self._in_flight.max_bytes:
            text = "the master is reading too many large requests at once; try again in a moment"
            raise HTTPException(503, text, {"Connection": "close", "Retry-After": "1"})
        return message

    def release(self) -> None:
        """Count its bytes no longer."""
        self._in_flight.bytes -= self._received
        self._received = 0


class _JsonRequest(Request):
    """A request whose JSON is read by orjson: fast, and neither lone surrogates nor NaN.

    The names of an object are in snake_case then, and ``null`` is as if it were absent.
    """

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < MAX_BYTES_ON_LOOP:
            value = orjson.loads(body)
        else:
            value = await asyncio.to_thread(orjson.loads, body)
        if isinstance(value, dict):
            value = {_to_snake(name): item for name, item in value.items() if item is not None}
        return value


def _to_snake(name: str) -> str:
    return _HUMP.sub(r"_\1", name).lower()


def _even_out(scope: Scope) -> Scope:
    """Return the scope with a JSON body, and with the query's names in snake_case."""
    # FastAPI reads a body as JSON only if its header says so, and many clients send none.
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
    headers.append((b"content-type", b"application/json"))
    query: bytes = scope["query_string"]
    # Most queries are in snake_case already, and are not parsed twice.
    if query.lower() != query:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        query = urlencode([(_to_snake(name), value) for name, value in pairs]).encode("latin-1")
    return {**scope, "headers": headers, "query_string": query}


def end_of_route(request: Request) -> str:
    """Return the last part of a route's path, for functions of several routes."""
    route: APIRoute = request.scope["route"]
    return route.path.rpartition("/")[2]


async def _service(request: Request) -> ServiceState:
    service: ServiceState = request.app.state.service
    return service


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


TheService = Annotated[ServiceState, Depends(_service)]
TheCaller = Annotated[Caller, Depends(_caller)]
