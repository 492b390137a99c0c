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


def connected() -> tuple[Channel, Channel]:
    """Both ends of a new connection.

    Raises:
        OSError: there are no more descriptors.
    """
    there, from_here = socket.socketpair()
    try:
        here, from_there = socket.socketpair()
    except OSError:
        there.close()
        from_here.close()
        raise
    return Channel(here, from_here), Channel(there, from_there)


class Channel:
    """One end of a connection.

    There is a pair of stream sockets for either direction: whoever reads from a socket wakes those that wait at its
    other end, whatever they wait for, and nobody waits at an end that is only written to.

    Args:
        incoming: what is read from.
        outgoing: what is written to.
    """

    def __init__(self, incoming: socket.socket, outgoing: socket.socket) -> None:
        self.incoming, self.outgoing = incoming, outgoing
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
        sent = socket.send_fds(self.outgoing, [data], [fd]) if fd is not None else 0
        if sent < len(data):
            self.outgoing.sendall(data[sent:])

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
            data, found, _, _ = self.incoming.recvmsg(READ, _ROOM)
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
        for end in (self.outgoing, self.incoming):
            with contextlib.suppress(OSError):  # the other side was faster
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the sockets."""
        self.incoming.close()
        self.outgoing.close()


def _decoded(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:  # there is a NaN or an infinity in it
        return json.loads(data)
