"""Commit or abort checkpoints, one after the other, in the caller's thread or in one of their own."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from det_core import _clock
from det_core.core._checkpoint._events import CheckpointObserver, record_of
from det_core.core._checkpoint._sharding import (
    Contribution,
    abort_quietly,
    plain_metadata,
    plan_shards,
    require_steps_completed,
    write_shards,
)
from det_core.core._rank_group import RankGroup
from det_core.errors import CheckpointBusy, CheckpointError, ContextClosed, DistributedError, StorageError
from det_core.storage import FileEntry, Header, Progress, Staging, Store

log = logging.getLogger("det_core.checkpoint")
IfBusy = Literal["wait", "raise"]
POLL_INTERVAL = 0.1
"""Seconds between two checks whether time is left."""
NOTICE_DELAY = 5.0
"""Seconds after which the end of a preempted process prints that it waits for a save."""
OPEN_NOTICE_DELAY = 60.0
"""Seconds after which a thread warns that it waits for another one's checkpoint: the two may wait for each other."""
STOP_TIMEOUT = 2.0
"""Maximum wait in seconds for a commit to stop after its deadline."""


class CheckpointHandle:
    """Checkpoint that ``checkpoint.begin()`` has begun: write into its folder, then :meth:`commit` or :meth:`abort` it.

    ``store_path()`` is its with-form. With ``shard=True`` every rank has one, and every rank calls one of the two
    methods; if any calls :meth:`abort`, nothing is kept. They may be called in any thread, such as the one that runs
    the callbacks of a future.

    Attributes:
        path: directory for its files, until :meth:`commit`. With ``shard=True`` each rank has its own, and the
            checkpoint is the union of them; a rank does not see the files of others.
        storage_id: ID of the checkpoint.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        group: RankGroup,
        staging: Staging,
        path: Path,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self._writer = writer
        self._group = group
        self._staging = staging
        self._metadata = metadata
        self._claim = threading.Lock()
        self._claimed_event = threading.Event()
        self._finished = threading.Event()
        self._reason: BaseException | None = None
        """Error for which it was aborted."""
        self._error: BaseException | None = None
        """Error of its commit or abort, until a call raises it."""
        self._failure: BaseException | None = None
        self._stop: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._beginner = threading.current_thread()
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
            CheckpointError: with ``blocking=False``, this process can start no thread.
            ValueError: a link in the folder leads out of it.
            RuntimeError: this checkpoint was committed or aborted before.

        If it fails on any rank, nothing is kept, and every rank raises.
        """
        self.commit_after(lambda _tick: None, blocking)

    def commit_after(self, fill: Callable[[Progress], None], blocking: bool) -> None:
        """As :meth:`commit`, but that ``fill`` is called before, in the thread that commits, to fill the folder.

        It is given a function to call now and then, which raises if the commit is to stop.
        """
        self._writer.check_process()
        try:
            metadata = plain_metadata(self._metadata or {})
            offer = functools.partial(self._filled, fill, metadata)
        except ValueError as e:
            offer = functools.partial(_raise, e)  # in the thread, which notifies the other ranks
        if not self._end(lambda: self._commit(offer), None, blocking):
            raise RuntimeError(f"checkpoint {self.storage_id} was committed or aborted before")

    def abort(self, reason: BaseException | None = None, blocking: bool = True) -> None:
        """Remove its files, and report nothing. Ranks that commit instead raise an error that names this one.

        Args:
            reason: the error because of which this rank gives up.
            blocking: return when all ranks know.
        """
        self._writer.check_process()
        if reason is not None and self.is_open:
            self._writer.note_abort(reason, self.storage_id, self._metadata)
        why = reason or CheckpointError(f"checkpoint {self.storage_id} was aborted")
        self._end(lambda: self._abort(why), why, blocking)

    @property
    def done(self) -> bool:
        """Whether its commit or abort is over."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until this checkpoint is committed, in whichever thread, and that is over.

        Args:
            timeout: seconds after which to return False; None: as long as it takes.

        Returns:
            whether the checkpoint is saved.

        Raises:
            CheckpointError: it could not be saved, or was aborted; the message says why.
        """
        self._writer.check_process()
        deadline = None
        if timeout is not None:
            deadline = _clock.monotonic() + timeout
        if not self._claimed_event.wait(timeout):
            return False
        if (why := self._reason) is not None:
            raise CheckpointError(f"checkpoint {self.storage_id} was aborted: {type(why).__name__}: {why}") from why
        if not self._finished.wait(None if deadline is None else max(0.0, deadline - _clock.monotonic())):
            return False
        self._error = None
        if self._failure is not None:
            raise self._background_error(self._failure)
        return True

    # For Commits.

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor aborted."""
        return not self._claimed_event.is_set()

    @property
    def is_open_here(self) -> bool:
        """Whether it is open, and nothing but this thread is known to end it: to wait for that would be for ever."""
        beginner = self._beginner
        return self.is_open and (beginner is threading.current_thread() or not beginner.is_alive())

    def discard(self, *, quietly: bool = False) -> None:
        """Discard its files without notifying other ranks, which do the same, or detect that this rank has departed."""
        why = CheckpointError(f"checkpoint {self.storage_id} was not committed when the context was closed")
        if self._claimed(why):
            if not quietly:
                log.warning("checkpoint %s was neither committed nor aborted: it is removed", self.storage_id)
            abort_quietly(self._staging)
            self._finished.set()

    def stop(self, reason: BaseException) -> None:
        """Let the commit fail with ``reason`` at its next step."""
        self._stop = self._stop or reason

    def take_error(self) -> BaseException | None:
        """Return its background error once, then None; None as well if it did not fail."""
        error = self._error
        self._error = None
        if error is None:
            return None
        return self._background_error(error)

    def _background_error(self, error: BaseException) -> BaseException:
        """Return the error for a call that did not wait for the save."""
        if isinstance(error, SystemExit):
            return error
        what = f"checkpoint {self.storage_id} was not saved in the background"
        if isinstance(error, StorageError):
            told: BaseException = StorageError(error.errno, f"{what}: {error.args[-1]}")
        elif isinstance(error, CheckpointError | DistributedError):
            told = type(error)(f"{what}: {error}")
        else:
            told = CheckpointError(f"{what}: {type(error).__name__}: {error}")
        told.__cause__ = error
        return told

    # The end.

    def _claimed(self, reason: BaseException | None) -> bool:
        """Claim the end of this checkpoint, and return whether no other thread had; ``reason`` is that of an abort."""
        with self._claim:
            if not self.is_open:
                return False
            self._reason = reason
            self._claimed_event.set()
            return True

    def _end(self, work: Callable[[], None], reason: BaseException | None, blocking: bool) -> bool:
        """Run the work that ends it, once, here or in a thread; raise its error if that is waited for."""
        if not self._claimed(reason):
            return False
        if blocking or not self._start_thread(work, reason):
            self._run(work)
            error = self._error
            self._error = None
            if error is not None:
                raise error
        return True

    def _start_thread(self, work: Callable[[], None], reason: BaseException | None) -> bool:
        """Return whether a thread runs the work; without one a commit becomes an abort on all ranks.

        Raises:
            CheckpointError: it was to be committed, and is aborted.
        """
        # None of concurrent.futures, and a daemon: a script that ends without close() has its checkpoint, as the
        # context is closed before Python joins its threads, and one that hangs in a disk keeps no process.
        thread = threading.Thread(target=self._run, args=(work,), name="det_core-upload", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as e:
            if reason is not None:
                return False
            error = self._background_error(
                CheckpointError(
                    f"this process cannot start a thread ({e}): save with blocking=True, or raise its limits of "
                    "threads and memory"
                )
            )

            def give_up() -> None:
                self._abort(error)
                raise error

            self._run(give_up)
            self._error = None
            raise error from e
        self._thread = thread
        return True

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._error = self._failure = e
        finally:
            self._finished.set()

    def _filled(self, fill: Callable[[Progress], None], metadata: dict[str, Any]) -> Contribution:
        fill(self._tick)
        self._tick(0)
        return Contribution(self._staging.scan_written(), metadata)

    def _commit(self, offer: Callable[[], Contribution]) -> None:
        writer = self._writer
        staging = self._staging
        try:
            plan = plan_shards(self._group, offer)
            finish = functools.partial(writer.publish, staging)
            write_shards(
                self._group, writer.store.disk, staging, plan,
                lambda listing: staging.seal(listing, self._tick), finish,
            )  # fmt: skip
        except BaseException as e:
            writer.note_abort(e, self.storage_id, self._metadata)
            abort_quietly(staging)
            raise

    def _abort(self, why: BaseException) -> None:
        try:
            self._group.report_failure(why)
        finally:
            abort_quietly(self._staging)

    def _tick(self, done: int) -> None:
        if self._stop is not None:
            raise self._stop
        if self._writer.progress is not None:
            self._writer.progress(done)


class CheckpointWriter:
    """The checkpoints that one rank writes, one at a time: so all ranks have one order, and none is announced.

    Threads take turns. A call has :meth:`turn` until its checkpoint is written or a handle has it; the next turn goes
    on when that handle is over. Sharded calls of several threads meet in the order in which each rank's threads come.

    Args:
        store: where they lie.
        run_id: the run that writes.
        restart: how often that run was restarted before.
        events: told of them.
        progress: called with the number of bytes that were copied or checked since it was last called.
        deadline: until when, on the monotonic clock, this process may go on; None: as long as it likes. Asked again
            and again while :meth:`close` waits.
        say: tells a person, in one line.
        latest: the checkpoint that this process starts from.
        is_chief: whether this rank commits, and so knows of every checkpoint.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        restart: int,
        observer: CheckpointObserver,
        progress: Progress | None,
        deadline: Callable[[], float | None],
        say: Callable[[str], None],
        latest: Callable[[], str | None],
        is_chief: bool,
    ) -> None:
        self.store = store
        self.progress = progress
        self._latest = latest
        self._is_chief = is_chief
        self._run_id = run_id
        self._restart = restart
        self._observer = observer
        self._deadline = deadline
        self._say = say
        self._ordinals = itertools.count(1)
        self._last: CheckpointHandle | None = None
        self._turns = threading.Condition()
        self._turn_of: threading.Thread | None = None
        self._closed = False
        self._newest: Header | None = None
        self._told_empty = False
        self._pid = os.getpid()

    @contextmanager
    def turn(self, group: RankGroup, if_busy: str) -> Iterator[None]:
        """Let one thread of this rank at a time begin a checkpoint, when the one before is over on every rank.

        Raises:
            CheckpointBusy: one is being saved, and a rank refuses to wait; or this thread has not ended the last one.
            ContextClosed: the context was closed meanwhile.
            Exception: If the previous one failed in the background, and no call has raised that.
        """
        with self._turns:
            if self._turn_of is threading.current_thread():  # such as a signal's handler, in the middle of a save
                raise CheckpointBusy("this very thread is saving a checkpoint: one is saved at a time")
            if self._turn_of is not None and if_busy == "raise" and not group.is_shared:
                raise CheckpointBusy("another thread is saving a checkpoint (if_busy='raise')")
            self._turns.wait_for(lambda: self._turn_of is None or self._closed)
            self._check_open()
            self._turn_of = threading.current_thread()
        try:
            self._wait_for_previous(group, if_busy)
            yield
        finally:
            with self._turns:
                self._turn_of = None
                self._turns.notify_all()  # one that is interrupted as it wakes would take a single one with it

    def _wait_for_previous(self, group: RankGroup, if_busy: str) -> None:
        """Wait for the previous checkpoint on every rank, or raise CheckpointBusy; raise its background error.

        Ranks say first whether they are busy, and wait then: else one that refuses would wait for one that waits.
        """

        def known() -> tuple[str, bool, str | None]:
            if if_busy not in ("wait", "raise"):
                raise ValueError(f"if_busy={if_busy!r}: expected 'wait' or 'raise'")
            self._check_open()
            last = self._last
            if last is not None and last.is_open_here:
                raise self._not_ended(last)
            return if_busy, last is not None, None if last is None or last.done else last.storage_id

        found = group.gather(known) or []

        def finish_previous() -> bool:
            busy = next((i for _, _, i in found if i is not None), None)
            if busy is not None and any(wanted == "raise" for wanted, _, _ in found):
                raise CheckpointBusy(f"checkpoint {busy} is still being saved (if_busy='raise')")
            return any(has for _, has, _ in found)

        if group.on_chief(finish_previous):
            group.on_all(self.finish_previous)

    def finish_previous(self) -> None:
        """Wait for the previous checkpoint, and raise its background error."""
        last = self._last
        if last is None:
            return
        began = _clock.monotonic()
        warned = False
        while not last._finished.wait(POLL_INTERVAL):
            self._check_open()
            if last.is_open_here:  # the thread that began it has ended meanwhile
                raise self._not_ended(last)
            if last.is_open and not warned and _clock.monotonic() - began > OPEN_NOTICE_DELAY:
                warned = True
                log.warning(
                    "waiting for checkpoint %s, which thread %r began, and has neither committed nor aborted",
                    last.storage_id, last._beginner.name,
                )  # fmt: skip
        self._check_open()
        self.raise_background_error()
        self._last = None

    def wait(self, timeout: float | None) -> bool:
        """Wait until nothing is being saved in the background; see :meth:`CheckpointContext.wait`."""
        last = self._last
        if last is not None and not last.is_open and not last._finished.wait(timeout):
            return False
        self.raise_background_error()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed("this CheckpointContext was closed while the call waited for its turn")

    def _not_ended(self, last: CheckpointHandle) -> CheckpointBusy:
        return CheckpointBusy(
            f"checkpoint {last.storage_id} was begun, and neither committed nor aborted: one is open at a time"
        )

    def track(self, handle: CheckpointHandle) -> CheckpointHandle:
        """Record the current checkpoint, and return it."""
        self._last = handle
        return handle

    def raise_background_error(self) -> None:
        """Raise the error of the last one, if it failed and no call has raised that."""
        if self._last is not None and self._last.done and (failure := self._last.take_error()) is not None:
            raise failure

    def publish(
        self, staging: Staging, files: dict[str, FileEntry], directories: list[str], metadata: dict[str, Any]
    ) -> None:
        """Publish a checkpoint and notify the observer: on the chief, once every rank's files are safe."""
        header = Header(
            run_id=self._run_id,
            restart=self._restart,
            ordinal=next(self._ordinals),
            time=_clock.iso(_clock.now()),
            steps_completed=require_steps_completed(metadata),
            storage_id=staging.storage_id,
        )
        if not files and not self._told_empty:
            self._told_empty = True
            log.warning("checkpoint %s is empty: no file was written into its folder", staging.storage_id)
        self._observer.on_committing(staging.storage_id)
        manifest = staging.commit(files, directories, metadata, header)
        self._newest = header
        self._observer.on_committed(record_of(manifest, metadata))

    def note_abort(self, error: BaseException, storage_id: str, metadata: Mapping[str, Any] | None) -> None:
        """Print that a checkpoint was given up for an exception that ends a script without a traceback."""
        if isinstance(error, Exception):
            return
        steps = (metadata or {}).get("steps_completed")
        if steps is None:
            name = f"checkpoint {storage_id}"
        else:
            name = f"the checkpoint of step {steps}"
        self._say(f"{name} was given up: {type(error).__name__} before it was complete")

    def check_process(self) -> None:
        """Raise ContextClosed in a process that was forked from the one with the context."""
        if self.is_forked:
            raise ContextClosed("this process was forked from the one that opened the CheckpointContext")

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one with the context."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """Discard a checkpoint that is open, or wait for its save, and raise its background error.

        Raises:
            CheckpointError: If it was not saved; at the deadline the message names the newest that is.
        """
        if self.is_forked:
            return
        with self._turns:
            self._closed = True
            self._turns.notify_all()
        last = self._last
        if last is None:
            self._say_what_is_saved()
            return
        last.discard()
        try:
            limited = self._wait_for(last)
        except BaseException as e:
            last.stop(e)
            last._finished.wait(STOP_TIMEOUT)
            raise
        failure = last.take_error()
        if not last.done:
            failure = CheckpointError(f"checkpoint {last.storage_id} was not saved: its commit could not be stopped")
        if failure is not None and limited:
            raise CheckpointError(f"{failure}; {self._what_is_saved()}") from failure
        if failure is not None:
            raise failure
        if limited and self._newest is not None:
            self._say(f"checkpoint {self._newest.storage_id} is saved: steps_completed {self._newest.steps_completed}")

    def _wait_for(self, last: CheckpointHandle) -> bool:
        """Wait until a checkpoint is over, while there is time; return whether time is limited."""
        began = _clock.monotonic()
        limited = False
        announced = False
        while not last.done:
            until = self._deadline()
            now = _clock.monotonic()
            limited = limited or until is not None
            if until is not None and now < until and now - began >= NOTICE_DELAY and not announced:
                announced = True
                self._say(f"waiting for checkpoint {last.storage_id} to be saved, for {until - now:.0f} s at most")
            if until is not None and now >= until:
                last.stop(CheckpointError("the time that was left to save it is over"))
                last._finished.wait(STOP_TIMEOUT)
                break
            last._finished.wait(POLL_INTERVAL)
        if last.done and last._thread is not None:
            last._thread.join()
        return limited

    def _say_what_is_saved(self) -> None:
        """Where no save is under way, but the time is over, which may have ended one in the script's own thread."""
        until = self._deadline()
        if until is not None and _clock.monotonic() >= until:
            self._say(f"the time to save is over; {self._what_is_saved()}")

    def _what_is_saved(self) -> str:
        try:
            newest = self._newest or max(self.store.list(self._run_id), default=None)
        except StorageError as e:  # the store does not answer: what this rank remembers
            if not self._is_chief:
                return f"what is saved cannot be read: {e}"
            if (latest := self._latest()) is not None:
                return f"the newest that is saved is {latest}, from which this process started"
            newest = None
        if newest is None:
            return "no checkpoint of this run is saved"
        return f"the newest that is saved is {newest.storage_id}, steps_completed {newest.steps_completed}"


def _raise(error: Exception) -> Any:
    raise error
