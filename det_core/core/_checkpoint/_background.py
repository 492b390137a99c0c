"""Commits in the background: one thread per process, in the order that the chief gives."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from det_core.core._checkpoint._latch import Latch
from det_core.core._distributed import LaneLike
from det_core.errors import CheckpointError, ContextClosed, DistributedError, StorageError

log = logging.getLogger("det_core.checkpoint")
PATIENCE = 60.0
"""Seconds after which a rank that has not committed what the chief commits says so."""


class Job:
    """A commit, or an abort, in the background.

    Args:
        storage_id: of what.
        shared: whether every rank takes part.
        work: does it; called with this job, once. It may call :meth:`tick` now and then, so that it can be stopped.
    """

    def __init__(self, storage_id: str, shared: bool, work: Callable[[Job], None]) -> None:
        self.storage_id = storage_id
        self.shared = shared
        self.error: BaseException | None = None
        """Why it failed."""
        self.told = False
        """Whether somebody was told that."""
        self.elsewhere = False
        """Whether it is not the thread that does it, but somebody who ends it when it is done."""
        self._work = work
        self._over = Latch()
        self._stop: BaseException | None = None
        self._when_stopped: Callable[[], None] = _nothing

    @property
    def over(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set

    def entrust(self, when_stopped: Callable[[], None]) -> None:
        """Name who is to be called, in whichever thread, when it is to stop."""
        self._when_stopped = when_stopped
        if self._stop is not None:
            when_stopped()

    def stop(self, reason: BaseException) -> None:
        """Let it fail with ``reason`` at its next :meth:`tick`."""
        self._stop = self._stop or reason
        self._when_stopped()

    def tick(self, _bytes: int = 0) -> None:
        """Raise if it is to stop."""
        if self._stop is not None:
            raise self._stop

    def run(self) -> None:
        """Do it; what it raises is kept. Whoever runs it ends it, too."""
        try:
            self._work(self)
        except BaseException as e:
            self.error = e

    def end(self) -> None:
        """Let go of those who wait for it."""
        self._when_stopped = _nothing
        self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over; whether it is."""
        return self._over.wait(timeout)

    def failure(self) -> BaseException | None:
        """Why it failed, as an error that says what was not saved; None: it did not."""
        return None if self.error is None else _not_saved(self.storage_id, self.error)

    def raise_failure(self) -> None:
        """Raise :meth:`failure`, if there is one."""
        if (failure := self.failure()) is not None:
            self.told = True
            raise failure


class Background:
    """The jobs of one rank, done one after the other.

    The chief's order rules: before a job of all ranks it announces whose turn it is, and each of the others takes part
    once its own script has come to that commit (or abort). The thread lives as long as there are jobs.

    Args:
        lane: the collectives of the thread.
        rank: this rank.
    """

    def __init__(self, lane: LaneLike, rank: int) -> None:
        self._lane = lane
        self._rank = rank
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._failed: list[Job] = []
        self._resigned: dict[str, Job] = {}
        self._thread: threading.Thread | None = None
        self._running = False
        self._pid = os.getpid()

    def add(self, job: Job, begin: Callable[[Callable[[], None]], bool] | None = None) -> None:
        """Do a job when its turn comes.

        Args:
            job: what to do.
            begin: called at once if no other job is under way; may see to it that the job is prepared by somebody else,
                who calls the function that it is given when all that is left is to run it. Returns whether it has.
        """
        self.check_process()
        with self._changed:
            job.elsewhere = begin is not None and not self._jobs and not job.shared
            self._jobs[job.storage_id] = job
            self._changed.notify_all()
        if job.elsewhere:
            assert begin is not None
            if begin(lambda: self._do(job)):
                return
            job.elsewhere = False
        with self._changed:
            self._changed.notify_all()
            if not self._running:
                self._running = True
                self._thread = threading.Thread(target=self._run, name="det_core-upload")
                self._thread.start()

    def resign(self, job: Job) -> None:
        """Do a job only if the chief announces it: this rank will never come to its own commit."""
        with self._changed:
            self._resigned[job.storage_id] = job
            self._changed.notify_all()

    @property
    def concerned(self) -> bool:
        """Whether there may be jobs that are not over, or whose failure nobody was told."""
        return bool(self._jobs or self._failed)

    def under_way(self) -> list[Job]:
        """The jobs that are not over, in the order in which they were added."""
        self.check_process()
        with self._changed:
            return list(self._jobs.values())

    def untold(self) -> list[Job]:
        """The jobs whose failure nobody has been told."""
        with self._changed:
            self._failed = [job for job in self._failed if not job.told]
            return list(self._failed)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, as it does when no job is left."""
        if self._thread is not None:
            self._thread.join(timeout)

    def check_process(self) -> None:
        """Raise ContextClosed in a process forked from the one with the thread."""
        if self.forked:
            raise ContextClosed("this process was forked from the one that opened the CheckpointContext")

    @property
    def forked(self) -> bool:
        """Whether this is a process forked from the one with the thread."""
        return self._pid != os.getpid()

    # In the thread.

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._do(job)

    def _next(self) -> Job | None:
        """The job whose turn it is; None: there is none left, and the thread ends."""
        with self._changed:
            while (first := next(iter(self._jobs.values()), None)) is not None and first.elsewhere:
                self._changed.wait()
            if first is None:
                self._running = False
                return None
        try:
            if self._rank == 0 and first.shared:
                self._lane.broadcast(first.storage_id)
            return first if self._rank == 0 else self._own(self._lane.broadcast(None))
        except BaseException as e:  # no rank will come together with this one any more
            first.stop(e)
            return first

    def _own(self, storage_id: str) -> Job:
        """This rank's job for what the chief has announced."""
        with self._changed:
            while (job := self._jobs.get(storage_id) or self._resigned.get(storage_id)) is None:
                if not self._changed.wait(PATIENCE):
                    log.warning("rank %d has not committed checkpoint %s yet; the chief has", self._rank, storage_id)
            return job

    def _do(self, job: Job) -> None:
        job.run()
        if job.error is not None:
            log.warning("checkpoint %s was not saved: %s: %s", job.storage_id, type(job.error).__name__, job.error)
        with self._changed:
            self._jobs.pop(job.storage_id, None)
            if job.error is not None:
                self._failed.append(job)
            job.end()
            self._changed.notify_all()


def _nothing() -> None:
    """Nobody is to be called."""


def _not_saved(storage_id: str, error: BaseException) -> BaseException:
    """What a caller is told who did not wait for it."""
    if isinstance(error, SystemExit):
        return error
    what = f"checkpoint {storage_id} was not saved in the background"
    if isinstance(error, StorageError):
        told: BaseException = StorageError(error.errno, f"{what}: {error.args[-1]}")
    elif isinstance(error, CheckpointError | DistributedError):
        told = type(error)(f"{what}: {error}")
    else:
        told = CheckpointError(f"{what}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
