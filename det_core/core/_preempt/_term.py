"""SIGTERM under a master: no preemption, but the end; what was reported is made safe first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

PATIENCE = 5.0
"""Seconds that there are to make the reports safe. A second signal does not wait for it."""


class EndSafely:
    """On SIGTERM, calls ``settle()`` in a thread, then lets the signal end the process as without us.

    Stands only where nothing else does: a handler that the script installs takes its place.

    Args:
        settle: makes the reports safe; may take :data:`PATIENCE`.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._pid = os.getpid()
        self._installed = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def restore(self) -> None:
        """Put back the default, if our handler still stands."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if self._pid != os.getpid():  # a forked child, such as a DataLoader worker
            os.kill(os.getpid(), number)
            return
        work = threading.Thread(target=self._settle_quietly, name="det-core-term", daemon=True)
        work.start()
        threading.Thread(target=_end, args=(work, number), name="det-core-term-end", daemon=True).start()

    def _settle_quietly(self) -> None:
        try:
            self._settle()
        except Exception as e:
            os.write(2, f"det_core: at the end of this process: {type(e).__name__}: {e}\n".encode())


def _end(work: threading.Thread, number: int) -> None:
    work.join(PATIENCE)
    os.kill(os.getpid(), number)
