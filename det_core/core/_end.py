"""The end of a process: contexts that the script left open are closed, and no library keeps the interpreter."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from det_core.storage import calls_were_left

END_TIMEOUT = 1.0
"""Seconds that the interpreter gets to end while a library's call is still out."""
_closers: list[Callable[[], None]] = []
_is_watched = False
_script_status = 0


def end_in_time(close: Callable[[], None] | None = None) -> None:
    """Have ``close`` called when the main thread has ended, and the process end soon after.

    That comes before the interpreter joins its threads, and before its executors take no more work, without which a
    store in a cloud saves nothing: what is registered last is called first.
    """
    global _is_watched
    if close is not None and close not in _closers:
        _closers.append(close)
    if not _is_watched:
        import concurrent.futures.thread  # noqa: F401  registers its own

        threading._register_atexit(_end)  # type: ignore[attr-defined]
        _is_watched = True


def note_status(error: BaseException | None) -> None:
    """Note the status with which a script leaves a context, if it does so by SystemExit."""
    global _script_status
    if isinstance(error, SystemExit):
        code = error.code
        _script_status = code if isinstance(code, int) else int(code is not None)


def _end() -> None:
    for close in _closers:
        close()
    if calls_were_left():
        # The calls are on daemon threads, so this hardly ever comes to its end: only where the library has threads of
        # its own that Python joins, or waits in a function for the exit.
        threading.Thread(target=_end_by_force, name="det_core-end", daemon=True).start()


def _end_by_force() -> None:
    time.sleep(END_TIMEOUT)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    os._exit(_status())


def _status() -> int:
    """Return the status that the process would have: Python keeps an error that ended the script, but no SystemExit."""
    if getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None:
        return 1
    return _script_status
