"""A master's requests to stop: asked for in a thread, for as long as the script runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from random import SystemRandom

from det_core.backend import Backend
from det_core.errors import DetCoreError

logger = logging.getLogger("det_core.core")
HOLD = 60.0
"""Seconds that the master may hold a request before it says that there is nothing to say."""
AGAIN_FIRST, AGAIN_MOST = 0.25, 3.0
"""Seconds before a request that failed is made again; a random part of that, so that processes do not come together."""
GIVE_UP = 5.0
"""Seconds that the thread gets to end."""


class Poll:
    """Calls ``on_request()`` in its thread once the backend says that this process is to stop.

    Args:
        backend: who says so.
        on_request: what to do.
    """

    def __init__(self, backend: Backend, on_request: Callable[[], None]) -> None:
        self._backend, self._on_request = backend, on_request
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._thread = threading.Thread(target=self._run, name="det-core-preempt", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more. Twice is fine."""
        self._ended.set()
        if self._thread is None:
            return
        self._backend.stop_waiting()
        self._thread.join(GIVE_UP)
        self._thread = None

    def _run(self) -> None:
        jitter = SystemRandom()  # the global generator's numbers are the script's
        hold, pause = 0.0, AGAIN_FIRST  # the first answer comes at once, so that it is known whether there are any
        warned = False
        while not self._ended.is_set():
            try:
                stop = self._backend.preempted(hold)
            except DetCoreError as e:
                if self._ended.is_set():
                    return
                logger.log(
                    logging.DEBUG if warned else logging.WARNING,
                    "whether to stop cannot be asked, and is asked again and again: %s",
                    e,
                )
                warned = True
                self._ended.wait(pause * jitter.uniform(0.5, 1.0))
                pause = min(2 * pause, AGAIN_MOST)
                continue
            if stop:
                self._on_request()
                return
            hold, pause, warned = HOLD, AGAIN_FIRST, False
