"""Messages between this process and its helper: JSON, one after the other, some with a file descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any

import orjson

_LENGTH = struct.Struct("!Q")


class Channel:
    """One end of a connection.

    Args:
        end: of a pair of stream sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Say something; ``fd`` is open on the other side then.

        Raises:
            OSError: nobody listens.
        """
        data = orjson.dumps(message)
        data = _LENGTH.pack(len(data)) + data
        sent = socket.send_fds(self.socket, [data], [fd]) if fd is not None else 0
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """What the other side says next, and a descriptor that came with it.

        Raises:
            EOFError: the other side is gone.
        """
        try:
            head, fds, _, _ = socket.recv_fds(self.socket, _LENGTH.size, 1)
            head += self._read(_LENGTH.size - len(head)) if head else b""
            if not head:
                raise EOFError
            for fd in fds:
                os.set_inheritable(fd, False)
            return orjson.loads(self._read(*_LENGTH.unpack(head))), fds[0] if fds else None
        except ConnectionError as e:
            raise EOFError from e

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def hang_up(self) -> None:
        """Both sides read no more, in processes that were forked meanwhile, too."""
        with contextlib.suppress(OSError):  # the other side was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket."""
        self.socket.close()
