"""What the launcher itself says, on stderr, without ever waiting for whoever reads it."""

from __future__ import annotations

import os
import select
import time

PREFIX = "[launcher] "
_AT_ONCE = 4096  # PIPE_BUF: as much as a pipe that polls as writable takes without blocking


class Notices:
    """Lines on their way to a file descriptor."""

    def __init__(self, fd: int = 2) -> None:
        self.fd = fd
        self._waiting = b""

    def say(self, text: str) -> None:
        """Queue ``text``, each line behind the launcher's prefix, and write what can be written now."""
        lines = "".join(f"{PREFIX}{line}\n" for line in text.splitlines())
        self._waiting += lines.encode(errors="surrogateescape")
        self.flush(0)

    def show(self, lines: bytes) -> None:
        """Queue bytes as they are, and write what can be written now."""
        self._waiting += lines
        self.flush(0)

    @property
    def waiting(self) -> bool:
        """Whether something is queued."""
        return bool(self._waiting)

    def flush(self, seconds: float) -> None:
        """Write what is queued, waiting at most ``seconds`` for its reader."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        until = time.monotonic() + seconds
        while self._waiting and poll.poll(max(0.0, until - time.monotonic()) * 1000):
            try:
                written = os.write(self.fd, self._waiting[:_AT_ONCE])
            except BlockingIOError:
                continue
            except OSError:  # the reader has gone or the disk is full: there is nobody to tell
                written = len(self._waiting)
            self._waiting = self._waiting[written:]
