"""HTTP to one host, over connections that stay open.

This is the standard library's HTTP alone: importing ``requests`` takes longer than all else that ``det-core`` does
until a script starts (``benchmarks/create_to_first_line.py``).
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

Failed = (OSError, http.client.HTTPException)
"""What a connection that fails raises."""


class NotSent(Exception):
    """A request that has certainly not arrived: there was no connection. Its cause says why."""


class Answer:
    """An answer of which no more than the head is read yet."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self.connection = connection
        self.response = response
        self.status = response.status


class Http:
    """Connections to one host, as many as are in use at a time; may be used by several threads.

    Args:
        url: its address, with a port.
        certificate: a file of certificates to trust, or ``noverify``; None: those of the machine.
    """

    def __init__(self, url: str, certificate: str | None) -> None:
        self._parts = urlsplit(url)
        self._certificate = certificate
        self._idle: list[http.client.HTTPConnection] = []

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give back the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def answer(
        self, method: str, target: str, data: bytes | None, headers: dict[str, str], timeout: float | None
    ) -> Iterator[Answer]:
        """Send a request; the block may read the answer.

        Args:
            method: of HTTP.
            target: path and query, below the address.
            data: the body, if any.
            headers: what else is said.
            timeout: seconds without a byte after which the connection has failed; None: any number.

        Raises:
            NotSent: there was no connection.
            OSError, http.client.HTTPException: it failed later.
        """
        connection = self._connected(timeout)
        whole = False
        try:
            connection.request(method, self._parts.path + target, data, headers)
            response = connection.getresponse()
            yield Answer(connection, response)
            whole = response.isclosed()
        finally:
            if whole and connection.sock is not None:
                self._idle.append(connection)
            else:  # what is left of the answer would stand before the next one
                connection.close()

    def _connected(self, timeout: float | None) -> http.client.HTTPConnection:
        while self._idle:
            connection = self._idle.pop()
            if not _gone(connection):
                connection.sock.settimeout(timeout)
                return connection
            connection.close()
        try:
            connection = self._new()
            connection.timeout = 60.0 if timeout is None else timeout
            connection.connect()
        except Failed as e:
            raise NotSent from e
        connection.sock.settimeout(timeout)
        return connection

    def _new(self) -> http.client.HTTPConnection:
        host, port = str(self._parts.hostname), self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port)
        unverified = self._certificate == "noverify"
        context = ssl.create_default_context(cafile=None if unverified else self._certificate)
        if unverified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, context=context)


def _gone(connection: http.client.HTTPConnection) -> bool:
    """Whether the other side has closed a connection that nobody uses."""
    import select

    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
