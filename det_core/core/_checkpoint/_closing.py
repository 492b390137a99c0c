"""The end of a context: what is under way is waited for, as long as there is time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from det_core import _clock
from det_core.core._checkpoint._background import Background, Job
from det_core.errors import CheckpointError, StorageError
from det_core.storage import Header, Store

log = logging.getLogger("det_core.checkpoint")
LOOK = 0.1
"""Seconds between two looks whether there is still time."""
STOPPING = 5.0
"""Seconds that a commit gets to stop when there is no time left."""


class Closing:
    """Waits for the commits of one context when it closes.

    Args:
        store: where checkpoints lie.
        run_id: the run.
        deadline: until when, on the monotonic clock, this process may go on; None: as long as it likes. Asked again
            and again.
        say: tells a person, in one line.
    """

    def __init__(
        self, store: Store, run_id: str, deadline: Callable[[], float | None], say: Callable[[str], None]
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._deadline = deadline
        self._say = say
        self._newest: Header | None = None

    def saved(self, header: Header) -> None:
        """Note that a checkpoint is complete."""
        self._newest = header

    def wait(self, background: Background) -> None:
        """Wait for all jobs; raise what failed and nobody was told.

        Raises:
            CheckpointError: a checkpoint was not saved; if there was no time left, it names the newest that is.
        """
        announced = False
        try:
            while jobs := background.under_way():
                until = self._deadline()
                if until is not None and not announced:
                    announced = True
                    left = max(0.0, until - _clock.monotonic())
                    self._say(f"checkpoint {jobs[0].storage_id} is being saved; there are {left:.0f} s to do so")
                if until is not None and _clock.monotonic() >= until:
                    self._stop(jobs, CheckpointError("the time that was left to save it is over"))
                    break
                jobs[0].wait(LOOK)
        except BaseException as e:
            self._stop(background.under_way(), e)
            raise
        stuck = background.under_way()
        if not stuck:
            background.join(STOPPING)
        failed = [*stuck, *background.untold()]
        if announced and not failed and self._newest is not None:
            self._say(f"checkpoint {self._newest.storage_id} is saved: steps_completed {self._newest.steps_completed}")
        if failed:
            self._raise(failed, announced)

    def _stop(self, jobs: list[Job], reason: BaseException) -> None:
        for job in jobs:
            job.stop(reason)
        end = _clock.monotonic() + STOPPING
        for job in jobs:
            job.wait(max(0.0, end - _clock.monotonic()))

    def _raise(self, failed: list[Job], preempted: bool) -> None:
        texts = []
        for job in failed:
            job.told = True
            texts.append(str(job.failure() or f"checkpoint {job.storage_id} could not be stopped, and is not saved"))
        if len(failed) == 1 and not preempted:
            failed[0].raise_failure()
        if preempted:
            texts.append(self._what_is_saved())
        raise CheckpointError("; ".join(texts))

    def _what_is_saved(self) -> str:
        newest = self._newest
        try:
            newest = newest or max(self._store.list(self._run_id), default=None)
        except StorageError as e:
            return f"what is saved cannot be read: {e}"
        if newest is None:
            return "no checkpoint of this run is saved"
        return f"the newest that is saved is {newest.storage_id}, steps_completed {newest.steps_completed}"
