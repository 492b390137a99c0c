"""Calls of storage libraries: each has a deadline, and is made by a thread that nobody waits for.

A library may wait for ever: for an answer, a name server, a token. Its coroutines run in an event loop on a daemon
thread, a call that blocks on a daemon thread of its own. The caller waits until the deadline and no longer, sees
signals meanwhile, and leaves behind what has not returned.
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

if TYPE_CHECKING:  # it takes 60 ms to import, for which nobody waits who keeps checkpoints in a directory
    from asyncio import AbstractEventLoop

log = logging.getLogger("det_core.storage")
POLL_INTERVAL = 0.25
"""Seconds between two looks at a deadline that may have come nearer."""
PING_TIMEOUT = 1.0
"""Seconds in which an event loop that is not blocked runs what it was given."""
LOOP_THREAD = "det_core-storage-loop"


class OutOfTime(OSError):
    """A call that was not made, or left behind, as the process is to be gone."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, "this process was told to stop, and its grace period is over")

    def __str__(self) -> str:
        return str(self.args[1])


class Calls:
    """Calls of one library, in any thread.

    Attributes:
        deadline: until when, on the monotonic clock, this process may wait for anything; None: as long as it likes.
            Asked again and again.
        is_silent: whether the last call had no answer in time.
    """

    def __init__(self) -> None:
        self.deadline: Callable[[], float | None] = lambda: None
        self.is_silent = False

    @property
    def is_out_of_time(self) -> bool:
        """Whether no call is made any more, as the process is to be gone."""
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
        """Return what ``work`` returns.

        Args:
            work: a call that blocks; with a loop one that makes a coroutine.
            loop: where the coroutine runs, on another thread.
            timeout: maximum wait in seconds.
            since: when the wait began or the work last got on, on the monotonic clock; None: now.
            past_deadline: make the call even if the process is to be gone.

        Raises:
            TimeoutError: If there was no answer in time.
            OutOfTime: If the process is to be gone.
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
                # The error of a call may be a TimeoutError, too: it is raised by the look above.
                wait([future], min(left, POLL_INTERVAL))
            except BaseException:
                future.cancel()
                raise

    def _leave(self, future: Future[Any], loop: AbstractEventLoop | None) -> None:
        """Give a call up, and its event loop, too, if the call blocks it."""
        global _calls_left, _loop
        self.is_silent = _calls_left = True
        future.cancel()
        if loop is not None and loop is _loop:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            if not turned.wait(PING_TIMEOUT):
                _loop = None


def calls_were_left() -> bool:
    """Return whether a call of this process was left behind, which may never return."""
    return _calls_left


def library_loop() -> AbstractEventLoop:
    """Return the event loop in which libraries run.

    Not fsspec's: name servers are asked by threads of a loop's executor, which Python joins at its end, and what nobody
    awaits any more is no business of the person at the terminal.
    """
    global _loop, _loop_pid
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    class DaemonThreads(ThreadPoolExecutor):
        """An executor, of the class that asyncio insists on, whose threads the interpreter does not wait for."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return _started(lambda: fn(*args, **kwargs), None)

    with _lock:
        if _loop is None or _loop_pid != os.getpid():  # a fork has no threads but one
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
    """Log an error that nobody awaits: of parts of a request that was tried again, or was given up."""
    log.debug("%s", context.get("message"), exc_info=context.get("exception"))
