"""Inbox of a channel: frames from sockets that its caller reads, and from the ipc thread."""

from __future__ import annotations

import os
import select
import threading
from collections import defaultdict, deque

from det_core.ipc._frames import Frame
from det_core.ipc._unix_link import UnixLink


class Inbox:
    """Frames that have arrived on one channel.

    Used by one thread at a time, that of the channel's call, except for ``deliver`` and ``wake``.
    """

    def __init__(self) -> None:
        self.pending: dict[int, deque[Frame]] = defaultdict(deque)
        """By rank, the received frames that no call has used yet."""
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._delivered: deque[Frame] = deque()
        self._links: dict[int, UnixLink] = {}
        # Guards the eventfd: after close() its number may belong to another file, into which wake() would write.
        self._lock = threading.Lock()

    def attach(self, link: UnixLink) -> None:
        """Receive from this link, too, in the calling thread."""
        self._links[link.fd] = link
        self._poll.register(link.fd, select.EPOLLIN)

    def deliver(self, frame: Frame) -> None:
        """Add a frame that the ipc thread has received."""
        self._delivered.append(frame)
        self.wake()

    def wake(self) -> None:
        """Wake a waiting caller."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def receive(self, seconds: float) -> list[Frame] | None:
        """Wait for frames or a wakeup, and return the frames, or None if the time passed without either.

        Raises:
            BadFrame: If the received bytes are not a frame.
        """
        events = self._poll.poll(seconds)
        if not events:
            return None
        frames: list[Frame] = []
        for fd, _ in events:
            if fd == self._wake:
                os.eventfd_read(fd)
                while self._delivered:
                    frames.append(self._delivered.popleft())
                continue
            link = self._links[fd]
            frames += link.receive()
            # The ipc thread handles the end of the peer; here the closed link would be readable forever.
            if link.eof:
                self._poll.unregister(fd)
        return frames

    def close(self) -> None:
        """Close the inbox's own descriptors; no caller may be in ``receive``."""
        with self._lock:
            if self._wake >= 0:
                self._poll.close()
                os.close(self._wake)
                self._wake = -1

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child."""
        # The child's copy of the lock stays locked if another thread of the parent held it.
        self._lock = threading.Lock()
        self.close()
