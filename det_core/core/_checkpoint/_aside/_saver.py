"""This process's helper: started at the first save, asked, waited for, replaced when it dies."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from det_core.core._checkpoint._aside._errand import Errand, Unavailable
from det_core.core._checkpoint._aside._image import Image
from det_core.core._checkpoint._aside._process import Gone, HelperProcess
from det_core.core._checkpoint._background import Job

LOOK = 0.2
"""Seconds between two looks whether the work is to be stopped."""


class Saver:
    """A helper process, started when it is first asked, and again after it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: HelperProcess | None = None
        self._last: Errand | None = None

    @property
    def pid(self) -> int | None:
        """The process; None: there is none at the moment."""
        return None if self._process is None or self._process.gone else self._process.pid

    def say(self, message: dict[str, Any]) -> int:
        """Tell it something that needs no answer; returns the process that was told.

        Raises:
            Unavailable: there is no helper, and will be none.
        """
        with self._lock:
            while True:
                process = self._started()
                with contextlib.suppress(Gone):
                    process.say(message)
                    return process.pid

    def tell(
        self, image: Image, message: dict[str, Any], job: Job, then: Callable[[Errand], None] | None = None
    ) -> Errand:
        """Have it do something with an image, and return at once.

        Args:
            image: the memory.
            message: what to do.
            job: of which this is the work: if it is stopped the helper is ended in the middle of it.
            then: called with the errand when it is over, in another thread.

        Raises:
            Unavailable: there is no helper, and will be none.
        """
        if image.fd is None:
            self.close()  # it may have begun to prepare
            raise Unavailable("this process can share no memory")
        errand = self._last = Errand(then)
        with self._lock:
            while True:
                process = self._started()
                try:
                    process.tell(image, message, errand)
                    break
                except Gone:
                    continue
        job.entrust(lambda: process.kill(errand))
        return errand

    def ask(self, image: Image, message: dict[str, Any], job: Job) -> dict[str, Any]:
        """As :meth:`tell`, and wait for what comes of it; raises what :meth:`Errand.result` raises."""
        errand = self.tell(image, message, job)
        while not errand.wait(LOOK):
            job.tick()
        return errand.result()

    def close(self) -> None:
        """End it."""
        atexit.unregister(self._at_exit)
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _started(self) -> HelperProcess:
        if self._process is None or self._process.gone:
            self._process = HelperProcess()
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
        return self._process

    def _at_exit(self) -> None:
        """A script ends that never closed its context: what it saved last is saved."""
        process, errand = self._process, self._last
        if process is not None and errand is not None and not process.forked:
            while not errand.wait(LOOK):
                continue
        self.close()
