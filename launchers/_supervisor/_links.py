"""The launcher's end of its connection to one wrapper."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .._wrapper._protocol import MAX_MESSAGE
from ._ranks import Rank


@dataclass
class Link:
    """A wrapper that has connected; its rank once it has said hello."""

    socket: socket.socket
    rank: Rank | None = None

    def receive(self) -> bytes:
        """The next message; nothing if the wrapper has gone."""
        try:
            return self.socket.recv(MAX_MESSAGE)
        except ConnectionResetError:
            return b""


def send(link: Link, message: bytes, *, streams: tuple[int, ...] = ()) -> bool:
    """Send ``message``, with file descriptors if some are given; False if the wrapper has gone or does not listen.

    It never waits: a wrapper that has stopped must not stop the launcher.
    """
    try:
        socket.send_fds(link.socket, [message], streams, socket.MSG_DONTWAIT)
    except (BrokenPipeError, ConnectionResetError, BlockingIOError):
        return False
    return True
