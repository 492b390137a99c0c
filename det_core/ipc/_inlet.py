"""Where the frames of one lane arrive: from sockets that its caller reads, or handed over by the ipc thread."""

from __future__ import annotations

import os
import select
import threading
from collections import defaultdict, deque

from det_core.ipc._frames import Frame
from det_core.ipc._link import UnixLink


class Inlet:
    """Frames in order of arrival, by sender. Read by one thread, the lane's caller; ``deliver`` and ``wake`` by any."""

    def __init__(self) -> None:
        self.waiting: dict[int, deque[Frame]] = defaultdict(deque)
        """By rank, what the caller has taken in and not used yet."""
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._inbox: deque[Frame] = deque()
        self._links: dict[int, UnixLink] = {}
        self._lock = threading.Lock()

    def attach(self, link: UnixLink) -> None:
        """Read this link too, in the calling thread."""
        self._links[link.fd] = link
        self._poll.register(link.fd, select.EPOLLIN)

    def deliver(self, frame: Frame) -> None:
        """Hand over a frame that the ipc thread has read."""
        self._inbox.append(frame)
        self.wake()

    def wake(self) -> None:
        """Have a waiting caller look again."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def arrivals(self, seconds: float) -> list[Frame] | None:
        """Wait until something happens; the frames that have arrived, or None when nothing has happened in time.

        Raises:
            BadFrame: what arrived is no frame.
        """
        events = self._poll.poll(seconds)
        if not events:
            return None
        frames: list[Frame] = []
        for fd, _ in events:
            if fd == self._wake:
                os.eventfd_read(fd)
                while self._inbox:
                    frames.append(self._inbox.popleft())
                continue
            link = self._links[fd]
            frames += link.receive()
            if link.eof:
                self._poll.unregister(fd)
        return frames

    def close(self) -> None:
        """Close the inlet's own descriptors; no caller may be in ``arrivals`` any more."""
        with self._lock:
            if self._wake >= 0:
                self._poll.close()
                os.close(self._wake)
                self._wake = -1

    def abandon(self) -> None:
        """As ``close``, in a forked child, where another thread may have held the lock."""
        self._lock = threading.Lock()
        self.close()
