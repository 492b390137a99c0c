"""The ipc thread: one epoll loop per communicator, which reads the control links and flushes their queues."""

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
"""Maximum wait in seconds of ``stop`` for a handler to return."""


class EventLoop:
    """Loop on a daemon thread that calls handlers when descriptors are ready.

    ``watch``, ``unwatch`` and ``call_soon`` may be called from any thread; ``call_soon`` also from a signal handler.

    Args:
        name: name of the thread.
        on_crash: called on the thread with the exception of a handler, which ends the loop.
    """

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._stopping = False
        self._on_crash = on_crash
        # Daemon: the interpreter would join any other thread before the atexit handlers that notify the peers.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.after_each: list[Callable[[], None]] = []
        """Callbacks after every round, for sources that signal readiness only once, on the edge (ZMQ)."""
        self.watch(self._wake, select.EPOLLIN, self._read_wakeup)
        self.thread.start()

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(events)`` whenever ``fd`` is ready."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Watch ``fd`` for these events instead."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``, which must still be open."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` on the thread, without taking a lock: a deque's append and one write."""
        self._soon.append(fn)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def call_later(self, delay: float, fn: Callable[[], None]) -> None:
        """Run ``fn`` after ``delay`` seconds. Only for callers on the loop's own thread."""
        self._timers.append((monotonic() + delay, fn))

    def stop(self) -> bool:
        """End the thread after the calls queued so far, and close the loop's own descriptors.

        Returns:
            Whether the thread has ended. If a handler never returns it has not, and nothing is closed.
        """
        self.call_soon(lambda: setattr(self, "_stopping", True))
        self.thread.join(_STOP_TIMEOUT)
        if self.thread.is_alive():
            logger.warning("ipc thread did not stop: a handler has not returned within %g s", _STOP_TIMEOUT)
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the loop's own descriptors; in a forked child, which has no such thread, call this alone."""
        wake = self._wake
        self._wake = -1
        if wake >= 0:
            self._epoll.close()
            os.close(wake)

    def _read_wakeup(self, _events: int) -> None:
        os.eventfd_read(self._wake)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_once()
        except BaseException as e:
            logger.debug("ipc thread failed", exc_info=True)
            self._on_crash(e)

    def _run_once(self) -> None:
        timeout = None
        if self._soon:
            timeout = 0.0
        elif self._timers:
            timeout = max(0.0, min(due for due, _ in self._timers) - monotonic())
        ready = [(fd, self._handlers.get(fd), events) for fd, events in self._epoll.poll(timeout)]
        for fd, handler, events in ready:
            # An earlier handler of this round may have closed the descriptor, and opened another of its number.
            if handler is not None and self._handlers.get(fd) is handler:
                handler(events)
        # Calls that these calls queue wait for the next round, or a call that queues itself would starve the links.
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        if self._timers:
            now = monotonic()
            timers = self._timers
            # Replaced before the calls, which may add timers.
            self._timers = [timer for timer in timers if timer[0] > now]
            for due, fn in timers:
                if due <= now:
                    fn()
        for callback in self.after_each:
            callback()
