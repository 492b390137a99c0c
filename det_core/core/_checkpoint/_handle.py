"""A checkpoint that a script is writing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.core._checkpoint._agree import Finish, Offering, agree, remove, write
from det_core.core._checkpoint._background import Background, Job
from det_core.core._checkpoint._metadata import plain_metadata
from det_core.core._checkpoint._together import Together
from det_core.errors import CheckpointError
from det_core.storage import Disk, Listing, Progress, Staging
from det_core.storage._draft import give_back

log = logging.getLogger("det_core.checkpoint")
INTERRUPTED = 5.0
"""Seconds that an interrupted wait lets a commit take to stop."""


@dataclass(frozen=True)
class Means:
    """What handles of one context work with."""

    disk: Disk
    background: Background
    finish: Finish
    progress: Progress | None = None


class CheckpointHandle:
    """What ``checkpoint.begin()`` gives: a folder to write into, and then :meth:`commit` or :meth:`abort`.

    ``store_path()`` is its with-form. With ``shard=True`` every rank has one, and every rank calls one of the two
    methods; if any calls :meth:`abort`, nothing is kept. They may be called in any thread, such as the one that runs
    the callbacks of a future, and ranks that write several checkpoints at a time may end them in different orders.

    Attributes:
        path: the folder to write files into, until :meth:`commit`. With ``shard=True`` each rank has one of its own,
            and the checkpoint is the union of them; a rank does not see what another one writes.
        storage_id: what the checkpoint will be known by.
    """

    def __init__(
        self,
        together: Together,
        staging: Staging,
        path: Path,
        metadata: Mapping[str, Any] | None,
        means: Means,
        ended: Callable[[CheckpointHandle], None],
        given_up: Listing | None = None,
    ) -> None:
        self._together = together
        self._staging = staging
        self._metadata = metadata
        self._means = means
        self._ended = ended
        self._given_up = given_up
        self._claim = threading.Lock()
        self._ending = threading.Event()
        self._reason: BaseException | None = None
        self._job: Job | None = None
        self.storage_id = staging.storage_id
        self.path = path

    def commit(self, blocking: bool = True) -> None:
        """Make what was written durable, complete and listed, and report it.

        Metadata is read again here, so keys that were added to the dictionary meanwhile count. From now on nothing may
        be written into the folder.

        Args:
            blocking: on return every rank's files are safe. Otherwise that is done in the background; see :meth:`wait`.
                A failure that :meth:`wait` has not told is raised by the next call on ``ctx.checkpoint``, or when the
                context is closed.

        Raises:
            CheckpointConflict: ranks wrote different files under one name, or gave different metadata.
            StorageError: the store refused; the message names path and operation.
            ValueError: a link in the folder leads out of it.
            RuntimeError: this checkpoint was committed or aborted before.

        If it fails, on any rank, nothing is kept, and every rank is told.
        """
        self.commit_after(lambda _: None, blocking)

    def commit_after(self, write: Callable[[Job], None], blocking: bool) -> None:
        """As :meth:`commit`, but that ``write`` is called before, in the thread that commits, to fill the folder."""
        self._means.background.check_process()
        job = self._begin_end(Job(self.storage_id, self._together.shared, self._committer(write)))
        if job is None:
            raise RuntimeError(f"checkpoint {self.storage_id} was committed or aborted before")
        self._do(job, now=blocking and not job.shared, blocking=blocking)

    def abort(self, reason: BaseException | None = None, blocking: bool = True) -> None:
        """Remove what was written, and report nothing. Ranks that commit instead are told of this one.

        Args:
            reason: the error because of which this rank gives up.
            blocking: return when all ranks know.
        """
        self._means.background.check_process()
        why = reason or CheckpointError(f"checkpoint {self.storage_id} was aborted")
        job = self._begin_end(Job(self.storage_id, self._together.shared, lambda _: self._give_up(why)), why)
        if job is None:
            return
        self._do(job, now=not job.shared, blocking=blocking)

    def _do(self, job: Job, *, now: bool, blocking: bool) -> None:
        """Do a job, in this thread or in its turn in the background; raise why it failed, if that is waited for."""
        if now:
            job.run()
            job.end()
        else:
            self._means.background.add(job)
        if blocking:
            self._await(job)
            job.told = True
            if job.error is not None:
                raise job.error

    @property
    def done(self) -> bool:
        """Whether it was committed or aborted, and nothing of that is left to do."""
        return self._job is not None and self._job.over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until this checkpoint is committed, in whichever thread, and that is over.

        Args:
            timeout: seconds after which to return False; None: as long as it takes.

        Returns:
            whether the checkpoint is saved.

        Raises:
            CheckpointError: it could not be saved, or was aborted; the message says why.
        """
        self._means.background.check_process()
        deadline = None if timeout is None else _clock.monotonic() + timeout
        if not self._ending.wait(timeout):
            return False
        if (why := self._reason) is not None:
            raise CheckpointError(f"checkpoint {self.storage_id} was aborted: {type(why).__name__}: {why}") from why
        assert self._job is not None
        if not self._job.wait(None if deadline is None else max(0.0, deadline - _clock.monotonic())):
            return False
        self._job.raise_failure()
        return True

    def drop(self) -> None:
        """Remove what was written without a word to the other ranks, unless they ask: the context is closing."""
        why = CheckpointError(f"checkpoint {self.storage_id} was not committed when the context was closed")
        job = self._begin_end(Job(self.storage_id, self._together.shared, lambda _: self._give_up(why)), why)
        if job is not None:
            log.warning("checkpoint %s was neither committed nor aborted: it is removed", self.storage_id)
            self._means.background.resign(job)
            self._return_files()
            self._remove()

    def withdraw(self, together: Together) -> None:
        """Undo all, before any commit; every rank does, because of an error that is under way."""
        if (job := self._begin_end(Job(self.storage_id, False, lambda _: None))) is not None:
            job.end()
        self._undo(together)
        self._ended(self)

    def _begin_end(self, job: Job, reason: BaseException | None = None) -> Job | None:
        """Claim the end of this checkpoint for ``job``, which gives it up for ``reason``; None: another one has."""
        with self._claim:
            if self._job is not None:
                return None
            self._job, self._reason = job, reason
            self._ending.set()
            return job

    def _await(self, job: Job) -> None:
        """Wait for a job of this thread's; an interrupt stops it, and goes on."""
        try:
            job.wait()
        except BaseException as e:
            job.stop(e)
            job.wait(INTERRUPTED)
            job.told = True
            raise

    # In the background, or in the caller's thread.

    def _committer(self, write: Callable[[Job], None]) -> Callable[[Job], None]:
        """What commits, with the metadata as it is now."""
        try:
            metadata = plain_metadata(self._metadata or {})
        except ValueError as e:
            problem = e
            return lambda job: self._commit(job, write, lambda: _raise(problem))
        return lambda job: self._commit(job, write, lambda: metadata)

    def _commit(self, job: Job, fill: Callable[[Job], None], metadata: Callable[[], dict[str, Any]]) -> None:
        report = self._means.progress

        def progress(done: int) -> None:
            job.tick()
            if report is not None:
                report(done)

        def offer() -> Offering:
            job.tick()
            given = metadata()
            fill(job)
            return Offering(self._staging.written(), given)

        try:
            agreed = agree(self._together, self._means.disk, offer)
            write(
                self._together, self._staging, agreed, lambda files: self._staging.take(files, progress),
                self._means.finish,
            )  # fmt: skip
        except BaseException:
            self._undo(self._together)
            raise
        finally:
            self._ended(self)

    def _give_up(self, why: BaseException) -> None:
        try:
            self._together.fail(why)
        finally:
            self._undo(self._together)
            self._ended(self)

    def _undo(self, together: Together) -> None:
        """Give back what was given up, on all ranks, and then remove what was written."""
        if self._given_up is not None:
            try:
                together.each(self._return_files)
            except Exception as e:
                log.warning("not all ranks could give back the files of checkpoint %s: %s", self.storage_id, e)
        self._remove()

    def _return_files(self) -> None:
        if self._given_up is not None:
            give_back(self._means.disk, self._given_up, self._staging.local)

    def _remove(self) -> None:
        remove(self._staging)


def _raise(error: Exception) -> dict[str, Any]:
    raise error
