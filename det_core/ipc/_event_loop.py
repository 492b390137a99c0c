"""The ipc thread: one epoll loop per star, which reads the control links and sends on what was queued."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from det_core._clock import monotonic

logger = logging.getLogger("det_core.ipc")
_STOP_TIMEOUT = 10.0
"""Seconds that ``stop`` waits for a handler to return."""


class EventLoop:
    """Runs handlers on one daemon thread when descriptors are ready.

    ``watch``, ``unwatch`` and ``call_soon`` may be called from any thread; ``call_soon`` also from a signal handler.

    Args:
        name: of the thread.
        on_crash: called on the thread with what a handler raised; the loop ends with that.
    """

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._stopping = False
        self._on_crash = on_crash
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.after_each: list[Callable[[], None]] = []
        """Called after every round of handlers: for sources whose readiness is told once only (ZMQ)."""
        self.watch(self._wake, select.EPOLLIN, self._read_wakeup)
        self.thread.start()

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(events)`` whenever ``fd`` is ready."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Watch ``fd`` for other events from now on."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``; it must still be open."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` on the thread. Takes no lock: a deque's append and one write."""
        self._soon.append(fn)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def call_later(self, seconds: float, fn: Callable[[], None]) -> None:
        """Run ``fn`` on the thread after ``seconds``. On the loop's own thread only."""
        self._timers.append((monotonic() + seconds, fn))

    def stop(self) -> bool:
        """End the thread after what was asked of it so far, and close what the loop itself opened.

        Returns:
            Whether it has ended; a handler that never returns keeps it, and then nothing is closed under its feet.
        """
        self.call_soon(lambda: setattr(self, "_stopping", True))
        self.thread.join(_STOP_TIMEOUT)
        if self.thread.is_alive():
            logger.warning("the ipc thread does not end: a handler has not returned for %g s", _STOP_TIMEOUT)
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the loop's own descriptors (alone, without the thread: in a forked child)."""
        wake, self._wake = self._wake, -1
        if wake >= 0:
            self._epoll.close()
            os.close(wake)

    def _read_wakeup(self, _events: int) -> None:
        os.eventfd_read(self._wake)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except BaseException as e:
            logger.debug("the ipc thread ends", exc_info=True)
            self._on_crash(e)

    def _round(self) -> None:
        timeout = max(0.0, min(t[0] for t in self._timers) - monotonic()) if self._timers else None
        ready = [(fd, self._handlers.get(fd), e) for fd, e in self._epoll.poll(0.0 if self._soon else timeout)]
        for fd, handler, events in ready:
            if handler is not None and self._handlers.get(fd) is handler:  # not closed and opened anew meanwhile
                handler(events)
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        if self._timers:
            now, timers = monotonic(), self._timers
            self._timers = [t for t in timers if t[0] > now]
            for at, fn in timers:
                if at <= now:
                    fn()
        for serve in self.after_each:
            serve()
