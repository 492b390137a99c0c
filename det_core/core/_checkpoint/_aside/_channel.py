"""Messages between this process and its helper: JSON, one after the other, some with a file descriptor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
from typing import Any

import orjson

_HEAD = struct.Struct("!Q?")
"""The bytes of what follows, and whether a descriptor comes with it."""
READ = 4 << 10
"""Bytes read at a time."""
_INT = struct.Struct("@i")
_ROOM = socket.CMSG_LEN(_INT.size)
"""Bytes for one descriptor."""


class Channel:
    """One end of a connection.

    Args:
        end: of a pair of stream sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._read = bytearray()
        self._fds: list[int] = []

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Say something; ``fd`` is open on the other side then.

        Raises:
            OSError: nobody listens.
        """
        data = orjson.dumps(message)
        if b"null" in data:  # which orjson makes of numbers that are not finite, too
            data = json.dumps(message, default=dataclasses.asdict).encode()
        data = _HEAD.pack(len(data), fd is not None) + data
        sent = socket.send_fds(self.socket, [data], [fd]) if fd is not None else 0
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """What the other side says next, and a descriptor that came with it.

        Raises:
            EOFError: the other side is gone.
        """
        while len(self._read) < _HEAD.size:
            self._receive_more()
        size, with_fd = _HEAD.unpack_from(self._read)
        end = _HEAD.size + size
        while len(self._read) < end:
            self._receive_more()
        message = _decoded(bytes(self._read[_HEAD.size : end]))
        del self._read[:end]
        return message, self._fds.pop(0) if with_fd else None

    def _receive_more(self) -> None:
        try:
            data, found, _, _ = self.socket.recvmsg(READ, _ROOM)
        except ConnectionError as e:
            raise EOFError from e
        if not data:
            raise EOFError
        self._read += data
        for _, _, descriptor in found:
            (fd,) = _INT.unpack(descriptor)
            os.set_inheritable(fd, False)
            self._fds.append(fd)

    def hang_up(self) -> None:
        """Both sides read no more, in processes that were forked meanwhile, too."""
        with contextlib.suppress(OSError):  # the other side was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket."""
        self.socket.close()


def _decoded(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:  # there is a NaN or an infinity in it
        return json.loads(data)
