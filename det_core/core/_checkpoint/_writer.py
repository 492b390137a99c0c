"""The writing half of ``ctx.checkpoint``."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from det_core import _clock
from det_core._optional import require
from det_core.core._checkpoint._agree import Offering, agree, remove, write
from det_core.core._checkpoint._aside import Announcement, Order, States
from det_core.core._checkpoint._background import Background, Job
from det_core.core._checkpoint._closing import Closing
from det_core.core._checkpoint._handle import CheckpointHandle, Means
from det_core.core._checkpoint._metadata import check_steps, merge_metadata, plain_metadata
from det_core.core._checkpoint._record import CheckpointRecord, Reports, record_of
from det_core.core._checkpoint._together import Together
from det_core.core._checkpoint._upload import Extras, Folder, FolderOrFolders, check_name
from det_core.core._distributed import DistributedContext
from det_core.errors import CheckpointBusy
from det_core.storage import FileEntry, Header, Listing, Owner, Progress, Selector, Staging, Store

log = logging.getLogger("det_core.checkpoint")
LANE = "checkpoint"
UPLOAD_LANE = "upload"
IfBusy = Literal["wait", "refuse"]
IF_BUSY = ("wait", "refuse")


class _Known(NamedTuple):
    """What one rank knows of its commits in the background."""

    if_busy: str
    over: dict[str, bool]
    """Of each that is under way, or whose failure was not told yet, whether it is over."""


class CheckpointWriter:
    """Stores checkpoints; see :class:`CheckpointContext`, which hands these calls on.

    Args:
        distributed: the ranks.
        store: where checkpoints lie.
        run_id: the run that writes.
        restart: how often that run was restarted before.
        owner: who writes.
        committing: called on the chief with a storage_id just before that checkpoint becomes complete.
        reports: made durable on the chief with each checkpoint; None: there are none.
        registered: called on the chief when a checkpoint is complete, in the thread that commits.
        closing: how long :meth:`close` waits.
        progress: called with the number of bytes that were copied since it was last called, in the thread that does.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        store: Store,
        *,
        run_id: str,
        restart: int,
        owner: Callable[[], Owner],
        committing: Callable[[str], None],
        reports: Reports | None,
        registered: Callable[[CheckpointRecord], None],
        closing: Closing,
        progress: Progress | None = None,
    ) -> None:
        self._distributed = distributed
        self._store = store
        self._run_id = run_id
        self._restart = restart
        self._owner = owner
        self._committing = committing
        self._reports = reports
        self._registered = registered
        self._closing = closing
        self._progress = progress
        self._ordinals = itertools.count(1)
        self._handles: set[CheckpointHandle] = set()
        self._background = Background(distributed.lane(UPLOAD_LANE), distributed.rank)
        self._states = States(store, progress)

    def upload(
        self,
        ckpt_dir: FolderOrFolders | None,
        metadata: Mapping[str, Any] | None,
        shard: bool,
        selector: Selector | None,
        blocking: bool,
        consume: bool,
        if_busy: str,
    ) -> str:
        """Copy a folder into a new checkpoint, or take it over; returns the storage_id."""
        together = self._writers("upload" if blocking and not consume else _name(blocking, consume), shard)
        folder = Folder(self._store.disk, ckpt_dir, selector)

        def offer() -> Offering:
            if ckpt_dir is None and not shard:
                raise RuntimeError("upload(ckpt_dir=None) needs shard=True: there is nothing to upload")
            folder.check(self._store.root)
            return folder.offer(self._metadata(metadata, shard))

        self._admit(together, if_busy)
        straight = blocking and not consume
        agreed = agree(together, self._store.disk, offer, compare=straight)
        staging = self._stage(together, shard)
        if not straight:
            return self._hand_over(together, staging, folder, agreed.listing, metadata, blocking, consume)
        try:
            write(together, staging, agreed, lambda files: staging.put(files, self._progress), self._finish)
        except BaseException:
            remove(staging)
            raise
        return staging.storage_id

    def begin(self, call: str, metadata: Mapping[str, Any] | None, shard: bool, if_busy: str) -> CheckpointHandle:
        """Start a checkpoint that is committed later."""
        together = self._writers(call, shard)
        self._admit(together, if_busy)
        given = together.gather(lambda: self._metadata(metadata, shard))
        together.chief(lambda: check_steps(merge_metadata(given or [])))
        return self._handle(together, self._stage(together, shard), metadata)

    def save(
        self,
        state: Any,
        metadata: Mapping[str, Any] | None,
        name: str,
        files: Mapping[str, bytes | os.PathLike[str]],
        shard: bool,
        blocking: bool,
        if_busy: str,
    ) -> str:
        """Store a state of torch as one file, and perhaps others beside it; returns the storage_id."""
        torch = self._torch
        check_name(name)
        extras = Extras(self._store.disk, files, beside=name)
        if blocking or shard or files or not self._states.direct:
            handle = self.begin("save" if blocking else "save(blocking=False)", metadata, shard, if_busy)
            try:
                extras.write(handle.path)
                if blocking:
                    path = handle.path / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    torch.save(state, path)
                    handle.commit()
                else:
                    shot = self._states.snapshot(state)
                    path = handle.path / name
                    self._states.lend(shot, lambda: handle.done)
                    handle.commit_after(lambda job: self._states.write(shot, str(path), job), False)
            except BaseException as e:
                handle.abort(e, blocking)
                raise
            return handle.storage_id
        return self._save_aside(state, metadata, name, if_busy)

    @functools.cached_property
    def _torch(self) -> Any:
        return require("torch", extra="torch", purpose="checkpoint.save()")

    def _save_aside(self, state: Any, metadata: Mapping[str, Any] | None, name: str, if_busy: str) -> str:
        """In the background, by one rank: nothing is done here but to copy."""
        self._admit(self._writers("save(blocking=False)", False), if_busy)
        plain = self._metadata(metadata, False)
        storage_id, owner, reports = new_storage_id(), self._owner(), self._reports
        file = None if reports is None else reports.file
        announcement = Announcement(storage_id, owner, name, plain, None if file is None else str(file))
        self._states.prepare(announcement)
        try:
            self._committing(storage_id)
            shot = self._states.snapshot(state)
        except BaseException:
            self._states.forget(announcement)
            raise
        order = Order(
            storage_id, name, shot.contents, self._run_id, self._restart, next(self._ordinals), check_steps(plain),
            owner, plain,
        )  # fmt: skip

        def work(job: Job) -> None:
            manifest, flushed = self._states.commit(order, shot, job)
            assert manifest.header is not None
            self._closing.saved(manifest.header)
            if reports is not None and not flushed:
                reports.flush()
            self._registered(record_of(manifest, plain))

        job = Job(storage_id, False, work)
        self._states.lend(shot, lambda: job.over)
        self._background.add(job, lambda then: self._states.begin(order, shot, job, then))
        return storage_id

    def raise_failures(self) -> None:
        """Raise what failed in the background and nobody was told."""
        for job in self._background.untold():
            job.raise_failure()

    def close(self) -> None:
        """Remove what was begun and never committed, and wait for what is under way."""
        if self._background.forked:
            return
        for handle in list(self._handles):
            handle.drop()
        self._handles.clear()
        try:
            self._closing.wait(self._background)
        finally:
            self._states.close()

    def _hand_over(
        self,
        together: Together,
        staging: Staging,
        folder: Folder,
        listing: Listing,
        metadata: Mapping[str, Any] | None,
        blocking: bool,
        consume: bool,
    ) -> str:
        """Bring the files into the staging's own folder, from which they are committed."""
        plain = None if metadata is None else plain_metadata(metadata)
        handle = self._handle(together, staging, plain, listing if consume else None)
        try:
            together.each(lambda: folder.bring(listing, handle.path, consume))
            if consume:
                together.each(lambda: folder.give_up(listing))
        except BaseException:
            handle.withdraw(together)
            raise
        handle.commit(blocking)
        return staging.storage_id

    def _handle(
        self,
        together: Together,
        staging: Staging,
        metadata: Mapping[str, Any] | None,
        given_up: Listing | None = None,
    ) -> CheckpointHandle:
        try:
            path = together.each(lambda: staging.path)
        except BaseException:
            remove(staging)
            raise
        means = Means(self._store.disk, self._background, self._finish, self._progress)
        ending = together.on(self._distributed.lane(UPLOAD_LANE)) if together.shared else together
        handle = CheckpointHandle(ending, staging, path, metadata, means, self._handles.discard, given_up)
        self._handles.add(handle)
        return handle

    def _admit(self, together: Together, if_busy: str) -> None:
        """Wait until no commit is under way that every rank has come to, or refuse; raise what has failed.

        One that some rank has not come to yet must not be waited for: that rank may come to it later.
        """
        if not together.shared and if_busy in IF_BUSY and not self._background.concerned:
            return

        def known() -> _Known:
            if if_busy not in IF_BUSY:
                raise ValueError(f"if_busy={if_busy!r}: expected 'wait' or 'refuse'")
            jobs = [*self._background.under_way(), *self._background.untold()]
            return _Known(if_busy, {job.storage_id: job.over for job in jobs})

        found = together.gather(known) or []

        def common() -> tuple[list[str], bool]:
            ids = [i for i in found[0].over if all(i in one.over for one in found)]
            busy = [i for i in ids if not all(one.over[i] for one in found)]
            if busy and any(one.if_busy == "refuse" for one in found):
                raise CheckpointBusy(f"checkpoint {busy[0]} is being saved, and if_busy='refuse' was asked for")
            return ids, any(over for one in found for over in one.over.values())

        ids, failed = together.chief(common)
        if ids or failed:
            together.each(lambda: self._await(ids))

    def _await(self, ids: list[str]) -> None:
        for job in self._background.under_way():
            if job.storage_id in ids:
                job.wait()
        self.raise_failures()

    def _stage(self, together: Together, shard: bool) -> Staging:
        """Make a staging on the chief, and join it on every rank if they write together."""
        made: list[Staging] = []

        def begin() -> str:
            made.append(self._store.begin(new_storage_id(), self._owner()))
            return made[0].ticket

        ticket = together.chief(begin)
        if not shard:
            return made[0]
        try:
            return together.each(lambda: self._store.join(ticket, self._distributed.rank))
        except BaseException:
            if made:
                remove(made[0])
            raise

    def _finish(
        self, staging: Staging, files: dict[str, FileEntry], directories: list[str], metadata: dict[str, Any]
    ) -> None:
        """Commit, then tell. On the chief, when every rank's files are safe."""
        header = Header(
            run_id=self._run_id,
            restart=self._restart,
            ordinal=next(self._ordinals),
            time=_clock.iso(_clock.now()),
            steps_completed=check_steps(metadata),
            storage_id=staging.storage_id,
        )
        self._committing(staging.storage_id)
        if self._reports is not None:
            self._reports.flush()
        manifest = staging.commit(files, directories, metadata, header)
        self._closing.saved(header)
        self._registered(record_of(manifest, metadata))

    def _metadata(self, metadata: Mapping[str, Any] | None, shard: bool) -> dict[str, Any]:
        if metadata is None and shard:
            return {}
        plain = plain_metadata(metadata)
        if not shard:
            check_steps(plain)
        return plain

    def _writers(self, call: str, shard: bool) -> Together:
        self._background.check_process()
        rank, size = self._distributed.rank, self._distributed.size
        if shard:
            lane = self._distributed.lane(LANE) if size > 1 else None
            return Together(call, lane, rank=rank, index=rank, size=size)
        if rank != 0:
            raise RuntimeError(
                f"checkpoint.{call}(shard=False) was called on rank {rank}, but only the chief (rank 0) may: call it "
                "under `if ctx.distributed.rank == 0:`, or on every rank with shard=True"
            )
        return Together(call, None, rank=rank, index=0, size=1)


def new_storage_id() -> str:
    """A name for a checkpoint."""
    import uuid

    return str(uuid.uuid4())


def _name(blocking: bool, consume: bool) -> str:
    """How messages name an upload; ranks that ask for different ones are told so."""
    said = [text for text, on in (("blocking=False", not blocking), ("consume=True", consume)) if on]
    return f"upload({', '.join(said)})"
