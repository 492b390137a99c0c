"""Calls of storage libraries, each with a deadline and in a thread that nobody has to wait for.

A library may block forever: for an answer, a name server, a token. Its coroutines run in an event loop on a daemon
thread, each blocking call on a daemon thread of its own. The caller waits until the deadline and no longer, handles
signals meanwhile, and abandons a call that has not returned.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from det_core import _clock

if TYPE_CHECKING:  # asyncio takes 60 ms to import, which a run with checkpoints in a directory must not pay
    from asyncio import AbstractEventLoop

log = logging.getLogger("det_core.storage")
POLL_INTERVAL = 0.25
"""Seconds between two checks of a deadline, which may move closer."""
PING_TIMEOUT = 1.0
"""Seconds within which an event loop that is not blocked runs a callback."""
LOOP_THREAD = "det_core-storage-loop"
"""Name of the event loop's thread."""


class OutOfTime(OSError):
    """A call that was not made, or was abandoned, as the process must exit."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, "the process was asked to stop and its grace period is over")

    def __str__(self) -> str:
        return str(self.args[1])


class Calls:
    """Calls of one library. Thread-safe.

    Attributes:
        deadline: returns the moment on the monotonic clock until which this process may wait, or None without a limit;
            called repeatedly.
        is_silent: whether the last call was not answered in time.
    """

    def __init__(self) -> None:
        self.deadline: Callable[[], float | None] = lambda: None
        self.is_silent = False

    @property
    def is_out_of_time(self) -> bool:
        """Whether calls are no longer made, as the process must exit."""
        deadline = self.deadline()
        return deadline is not None and deadline <= _clock.monotonic()

    def run(
        self,
        work: Callable[[], Any],
        loop: AbstractEventLoop | None,
        timeout: float,
        since: Callable[[], float] | None = None,
        *,
        past_deadline: bool = False,
    ) -> Any:
        """Return the result of ``work``.

        Args:
            work: a blocking call; with a loop, one that returns a coroutine.
            loop: event loop for the coroutine, on another thread.
            timeout: maximum wait in seconds.
            since: returns the moment of the last progress on the monotonic clock, from which the timeout counts.
                Defaults to the start of the call.
            past_deadline: make the call even if the process must exit.

        Raises:
            TimeoutError: If the call was not answered in time.
            OutOfTime: If the process must exit.
        """
        began = _clock.monotonic()
        future: Future[Any] | None = None
        while True:
            now = _clock.monotonic()
            left = (began if since is None else since()) + timeout - now
            deadline = None if past_deadline else self.deadline()
            if future is not None and future.done():
                self.is_silent = False
                return future.result()
            if left <= 0 or (deadline is not None and deadline <= now):
                if future is not None:
                    self._leave(future, loop)
                if left > 0:
                    raise OutOfTime
                raise TimeoutError(f"timed out after {timeout:.0f} s")
            future = future or _started(work, loop)
            try:
                # wait() and not result(), whose TimeoutError could be the call's own; that is raised above.
                wait([future], min(left, POLL_INTERVAL))
            except BaseException:
                future.cancel()
                raise

    def _leave(self, future: Future[Any], loop: AbstractEventLoop | None) -> None:
        """Abandon a call, and its event loop if the call blocks it."""
        global _calls_left, _loop
        self.is_silent = _calls_left = True
        future.cancel()
        if loop is not None and loop is _loop:
            has_turned = threading.Event()
            loop.call_soon_threadsafe(has_turned.set)
            if not has_turned.wait(PING_TIMEOUT):  # a callback blocks it for good: the next call gets another one
                _loop = None


def calls_were_left() -> bool:
    """Return whether this process has abandoned a call, which may never return."""
    return _calls_left


def library_loop() -> AbstractEventLoop:
    """Return the event loop for libraries, on a daemon thread."""
    # Not fsspec's: name servers are asked by threads of a loop's executor, which Python joins at exit, and errors that
    # nobody awaits are not for the terminal.
    global _loop, _loop_pid
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    class DaemonThreads(ThreadPoolExecutor):
        """Executor, of the class that asyncio requires, whose threads the interpreter does not wait for."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return _started(lambda: fn(*args, **kwargs), None)

    with _lock:
        if _loop is None or _loop_pid != os.getpid():  # a forked child has only the thread that forked
            _loop = asyncio.new_event_loop()
            _loop_pid = os.getpid()
            _loop.set_default_executor(DaemonThreads())
            _loop.set_exception_handler(_on_error)
            threading.Thread(target=_loop.run_forever, name=LOOP_THREAD, daemon=True).start()
        return _loop


_lock = threading.Lock()
_loop: AbstractEventLoop | None = None
_loop_pid = 0
_calls_left = False


def _after_fork_in_child() -> None:
    global _lock, _calls_left
    _lock = threading.Lock()  # another thread may have held it
    _calls_left = False


os.register_at_fork(after_in_child=_after_fork_in_child)


def _started(work: Callable[[], Any], loop: AbstractEventLoop | None) -> Future[Any]:
    """Start a call in its thread."""
    if loop is not None:
        import asyncio

        return asyncio.run_coroutine_threadsafe(_awaited(work), loop)
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="det_core-storage-call", daemon=True).start()
    return future


async def _awaited(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await work()


def _on_error(loop: AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that nobody awaits, such as of parts of a request that was retried or abandoned."""
    log.debug("%s", context.get("message"), exc_info=context.get("exception"))
