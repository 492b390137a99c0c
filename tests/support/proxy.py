"""A proxy before an HTTP server that does to chosen requests what networks and busy servers do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

RESET = "reset"
"""The connection is reset before the server has seen the request."""
LOST = "lost"
"""The server has done what was asked, and then the connection is reset."""
BUSY = "busy"
"""503 with Retry-After, and the server never sees the request."""
CONFLICT = "409"
TOO_MANY = "429"
"""An error of that status, and the server never sees the request."""
TRUNCATED = "truncated"
"""The response's head and half of its body, and then the connection ends."""
SILENT = "silent"
"""The connection stays open, and nothing comes."""
MOVED = "moved"
"""A redirect of the kind that S3 sends for a bucket in another region: it does not say where to."""
SLOW = "slow"
"""The response comes in small pieces."""
FAULTS = (RESET, LOST, BUSY, TRUNCATED)
"""Faults that a client has to survive by a retry."""
BUSY_BODY = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


class Request(NamedTuple):
    """A request that came by."""

    method: str
    path: str
    """With the query."""


Plan = Callable[[int, Request], "str | None"]
"""Fault for a request, given its number from 1; None: no fault."""


class Proxy:
    """A running proxy; ``requests`` has what came by since :meth:`begin`."""

    def __init__(self, target: str) -> None:
        self.aim(target)
        self.requests: list[Request] = []
        self.retry_after = "0"
        self._plan: Plan = lambda number, request: None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait()

    def begin(self, plan: Plan | None = None) -> None:
        """Count from 1 again, and follow a plan; None: let everything pass."""
        self.requests = []
        self._plan = plan or (lambda number, request: None)

    def aim(self, target: str) -> None:
        """Pass new connections on to another server."""
        address = urlsplit(target)
        self._target = (address.hostname, address.port)

    def drop(self) -> None:
        """Drop every connection."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def close(self) -> None:
        """Drop every connection and stop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                upstream = await asyncio.open_connection(*self._target)
                try:
                    while await self._one(reader, writer, *upstream):
                        pass
                finally:
                    upstream[1].close()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> bool:
        """Pass one request on; return whether the connection may have another."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        if b"\r\nexpect: 100-continue\r\n" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(reader, head)
        request = Request(method, path)
        self.requests.append(request)
        fault = self._plan(len(self.requests), request)
        if fault == SILENT:
            await asyncio.Event().wait()  # for ever
        if fault == RESET:
            return _reset(writer)
        if fault == BUSY:
            text = (
                f"HTTP/1.1 503 Slow Down\r\nRetry-After: {self.retry_after}\r\nContent-Length: {len(BUSY_BODY)}\r\n\r\n"
            )
            writer.write(text.encode() + BUSY_BODY)
            await writer.drain()
            return True
        if fault in (CONFLICT, TOO_MANY):
            writer.write(f"HTTP/1.1 {fault} Later\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
            return True
        if fault == MOVED:
            writer.write(b"HTTP/1.1 301 Moved Permanently\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return True
        to_server.write(head + body)
        await to_server.drain()
        answer = await from_server.readuntil(b"\r\n\r\n")
        while answer.startswith(b"HTTP/1.1 100"):
            answer = await from_server.readuntil(b"\r\n\r\n")
        data = b"" if method == "HEAD" or answer.split()[1] in (b"204", b"304") else await _body(from_server, answer)
        if fault == LOST:
            return _reset(writer)
        if fault == TRUNCATED:
            writer.write((answer + data)[: len(answer) + len(data) // 2 - (not data)])
            await writer.drain()
            return False
        for start in range(0, len(answer) + len(data), 1000 if fault == SLOW else 1 << 30):
            writer.write((answer + data)[start : start + (1000 if fault == SLOW else 1 << 30)])
            await writer.drain()
            await asyncio.sleep(0.01 if fault == SLOW else 0)
        return b"\r\nconnection: close" not in answer.lower()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Return the body that follows a head, as it is on the wire."""
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if fields.get(b"transfer-encoding", b"").strip() == b"chunked":
        parts = []
        while True:
            size = await reader.readuntil(b"\r\n")
            parts += [size, await reader.readexactly(int(size.split(b";")[0], 16) + 2)]
            if int(size.split(b";")[0], 16) == 0:
                return b"".join(parts)
    return await reader.readexactly(int(fields.get(b"content-length", b"0")))


def _reset(writer: asyncio.StreamWriter) -> bool:
    """End a connection by a reset instead of a close."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


@contextmanager
def proxy_before(target: str) -> Iterator[Proxy]:
    """Yield a proxy before the server at ``target``, a URL."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
