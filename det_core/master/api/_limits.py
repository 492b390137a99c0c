"""Limits on connections: deadlines for the peer, and how many may be open without a valid token.

A peer that sends half a request, or reads no answer, costs memory and a descriptor for as long as it likes. Trials keep
their connections open and show their tokens on each request, so they are never among those that wait here.
"""

from __future__ import annotations

import asyncio
import math
import resource
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

IDLE_TIMEOUT = 300
"""Seconds that a connection with a token may stay open without a request: longer than clients pause between two."""
STOP_TIMEOUT = 10
"""Seconds that requests under way have to end when the server stops."""
MAX_HEADER_BYTES = 64 << 10
"""Bytes of one request before its body; httptools has no limit of its own."""
MAX_PIPELINED = 16
"""Requests that a peer may send ahead of the answer to an earlier one."""
MAX_OPEN_FILES = 65_536
"""Descriptors that are enough: each connection needs one."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the connections of one server.

    Attributes:
        header_timeout: seconds from the first chance to send a request to the end of its headers.
        body_timeout: seconds without a part of a body; without a token, seconds for all of it.
        reader_timeout: seconds in which a peer may take nothing of an answer that it was sent.
        max_unknown: connections without a valid token that are served at a time.
    """

    header_timeout: float = 10.0
    body_timeout: float = 30.0
    reader_timeout: float = 60.0
    max_unknown: int = 128


DEFAULT_LIMITS = Limits()


def server_config(app: ASGIApp, limits: Limits = DEFAULT_LIMITS, **options: Any) -> uvicorn.Config:
    """Return the configuration of a server that holds its peers to the limits."""
    return uvicorn.Config(
        app,
        http=partial(LimitedProtocol, _Connections(limits)),  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_TIMEOUT,
        timeout_graceful_shutdown=STOP_TIMEOUT,
        **options,
    )


def raise_open_file_limit() -> None:
    """Raise this process's soft limit of descriptors, which is often 1,024, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with the limits.

    Routes find it as ``request.state.connection``.
    """

    def __init__(self, connections: _Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._limits = connections.limits
        self._is_known = False
        self._awaits_headers = True
        self._deadline = math.inf
        self._header_bytes = 0  # since the last part of a body: trailers count, too
        self._unsent = 0
        self._took_at = 0.0

    def accept_token(self) -> None:
        """Count the peer as known: it has shown a valid token."""
        if not self._is_known:
            self._is_known = True
            self._connections.release(self)

    def begin(self) -> None:
        """Read the first request, which the peer may send from now on."""
        # The headers of a connection that waited count from now on, not from its begin.
        self.flow.resume_reading()
        self._deadline = self.loop.time() + self._limits.header_timeout

    def close_if_overdue(self, now: float) -> None:
        """Close the connection if the peer has missed a deadline, without waiting for it to read what is unsent."""
        if self.flow.read_paused:
            # It is the application that does not read: the peer's time begins anew.
            self._deadline = max(self._deadline, now + self._limits.body_timeout)
        elif now > self._deadline:
            self.transport.abort()
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent or self._is_followed():
            self._took_at = now
        elif now > self._took_at + self._limits.reader_timeout:
            self.transport.abort()
        self._unsent = unsent

    def _is_followed(self) -> bool:
        """Return whether the answer is a stream that goes on until its subject ends, as a log that is followed."""
        return self._is_known and self.cycle is not None and self.cycle.scope["state"].get("is_followed", False)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._took_at = self.loop.time()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.remove(self)

    def data_received(self, data: bytes) -> None:
        # The first byte of a further request on a connection that was kept.
        if self._deadline == math.inf and self._awaits_headers:
            self._deadline = self.loop.time() + self._limits.header_timeout
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._awaits_headers = False
        self._header_bytes = 0
        self._deadline = self.loop.time() + self._limits.body_timeout
        # Each is kept with its body until those before it are answered.
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests ahead of an answer")  # httptools then answers 400

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._header_bytes = 0
        # Without a token a body has one deadline in all: a byte every now and then does not extend it.
        if self._is_known:
            self._deadline = self.loop.time() + self._limits.body_timeout

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._awaits_headers = True
        self._header_bytes = 0
        self._deadline = math.inf

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Without a token, a connection that is kept open for nothing holds one of few places.
        if not self._is_known and not self.pipeline:
            self._deadline = self.loop.time() + self._limits.header_timeout

    def resume_writing(self) -> None:
        super().resume_writing()
        self._took_at = self.loop.time()


class _Connections:
    """Connections of one server.

    Those without a valid token beyond the limit wait: their requests are not read until another one ends.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: set[LimitedProtocol] = set()
        self._unknown: set[LimitedProtocol] = set()
        self._waiting: dict[LimitedProtocol, None] = {}  # in the order of their arrival
        self._interval = min(limits.header_timeout / 10, 1.0)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: LimitedProtocol) -> None:
        """Serve a new connection, or let it wait."""
        self._open.add(connection)
        if len(self._unknown) < self.limits.max_unknown:
            self._unknown.add(connection)
            connection.begin()
        else:
            self._waiting[connection] = None
            # What it sends meanwhile stays in the kernel's buffers.
            connection.flow.pause_reading()
        if self._timer is None:
            self._timer = connection.loop.call_later(self._interval, self._look, connection.loop)

    def release(self, connection: LimitedProtocol) -> None:
        """Count a connection as one of the unknown no longer."""
        self._unknown.discard(connection)
        # Those that wait move up in the order of their arrival.
        while self._waiting and len(self._unknown) < self.limits.max_unknown:
            following = next(iter(self._waiting))
            del self._waiting[following]
            self._unknown.add(following)
            following.begin()

    def remove(self, connection: LimitedProtocol) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self.release(connection)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self._open):
            connection.close_if_overdue(now)
        self._timer = loop.call_later(self._interval, self._look, loop) if self._open else None
