"""End of a process: close contexts that the script left open, and exit although a library's call has not ended."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from det_core.storage import calls_were_left

END_TIMEOUT = 1.0
"""Maximum time for the interpreter to end while a call of a library has not, in seconds."""
_closers: list[Callable[[], None]] = []
_exit_hook_set = False
_script_status = 0


def end_in_time(close: Callable[[], None] | None = None) -> None:
    """Call ``close`` when the main thread has ended, and end the process soon after."""
    global _exit_hook_set
    if close is not None and close not in _closers:
        _closers.append(close)
    if not _exit_hook_set:
        # The last one registered is called first. So the import, which registers the end of all executors, comes before
        # our own: without executors, a store in a cloud saves nothing. Threads are joined after both.
        import concurrent.futures.thread  # noqa: F401

        threading._register_atexit(_end)  # type: ignore[attr-defined]
        _exit_hook_set = True


def note_status(error: BaseException | None) -> None:
    """Remember the status with which a script leaves a context by SystemExit."""
    global _script_status
    if isinstance(error, SystemExit):
        _script_status = int(error.code is not None)
        if isinstance(error.code, int):
            _script_status = error.code


def _end() -> None:
    for close in _closers:
        close()
    if calls_were_left():
        # The calls are on daemon threads, so the process has mostly ended before the timeout: not if the library has
        # threads that Python joins, or waits in an exit function.
        threading.Thread(target=_end_by_force, name="det_core-end", daemon=True).start()


def _end_by_force() -> None:
    time.sleep(END_TIMEOUT)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    os._exit(_status())


def _status() -> int:
    """Return the exit status that the process would have."""
    # Python keeps an error that ended the script here, but not a SystemExit.
    if getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None:
        return 1
    return _script_status
