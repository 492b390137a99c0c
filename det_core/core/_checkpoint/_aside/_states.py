"""States of torch saved in the background: a snapshot in memory, and whoever writes it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from det_core._optional import require
from det_core.core._checkpoint._aside._errand import Errand, Unavailable
from det_core.core._checkpoint._aside._image import Image
from det_core.core._checkpoint._aside._order import Contents, Order, commit_image, do_all, write_image
from det_core.core._checkpoint._aside._prepare import Announcement
from det_core.core._checkpoint._aside._processor import current
from det_core.core._checkpoint._aside._saver import Saver
from det_core.core._checkpoint._background import Job
from det_core.errors import StorageError
from det_core.storage import DirectoryStore, Manifest, Progress, Store
from det_core.storage._draft import is_shared, settle

if TYPE_CHECKING:
    from det_core.core._checkpoint._aside._snapshot import Snapshots

log = logging.getLogger("det_core.checkpoint")


class Shot(NamedTuple):
    """A state as it was, in memory of its own."""

    snapshots: Snapshots
    contents: Contents

    @property
    def image(self) -> Image:
        """The memory."""
        return self.snapshots.image


class States:
    """What saves states for one context.

    Args:
        store: where checkpoints lie.
        progress: told of the bytes that are written in this process.
    """

    def __init__(self, store: Store, progress: Progress | None = None) -> None:
        self._store = store
        self._progress = progress
        self.direct = type(store) is DirectoryStore
        """Whether a checkpoint can be made as a whole, from an order, by any process."""
        self._saver = Saver() if not isinstance(store, DirectoryStore) or is_shared(store) else None
        self._all: list[Snapshots] = []
        self._errands: dict[str, Errand] = {}
        """Those that are over, by storage_id, until :meth:`commit` asks for them."""
        self._prepared: dict[str, int] = {}
        """The helper that was told to prepare a checkpoint, by storage_id."""
        self._lent: list[tuple[Snapshots, Callable[[], bool]]] = []

    def prepare(self, announcement: Announcement) -> None:
        """Have the helper do what it can do before the state is there; :meth:`commit` follows, or :meth:`forget`."""
        if self._saver is None:
            return
        message = {"do": "prepare", "root": self._store.root, "announcement": announcement, "processor": current()}
        try:
            self._prepared[announcement.storage_id] = self._saver.say(message)
        except Unavailable as e:
            self._do_without(e)

    def forget(self, announcement: Announcement) -> None:
        """What was prepared is not going to be saved. The helper is ended, so that it does nothing for it later."""
        if self._prepared.pop(announcement.storage_id, None) is None:
            return
        if self._saver is not None:
            self._saver.close()
        try:
            settle(self._directory, announcement.storage_id, announcement.owner)
        except StorageError as e:
            log.warning("what was prepared for checkpoint %s stays: %s", announcement.storage_id, e)

    def snapshot(self, state: Any) -> Shot:
        """Copy a state; on return it may be changed. Its memory is used again unless it is :meth:`lend`.

        Raises:
            OSError: there is no memory for it.
            Exception: it cannot be pickled.
        """
        self._lent = [(snapshots, over) for snapshots, over in self._lent if not over()]
        free = [s for s in self._all if all(s is not lent for lent, _ in self._lent)]
        if not free:
            from det_core.core._checkpoint._aside._snapshot import Snapshots

            free = [Snapshots(Image())]
            self._all += free
        contents = free[0].take(state)
        return Shot(free[0], free[0].put(serialized(state)) if contents is None else contents)

    def lend(self, shot: Shot, over: Callable[[], bool]) -> None:
        """Let the memory of a snapshot be as it is until ``over()``."""
        self._lent.append((shot.snapshots, over))

    def begin(self, order: Order, shot: Shot, job: Job, then: Callable[[], None]) -> bool:
        """Have the helper make a checkpoint of it, for :meth:`commit`, to be called once it calls ``then``.

        Returns:
            False: there is no helper; :meth:`commit` does it all.
        """
        if self._saver is None:
            return False

        def heard(errand: Errand) -> None:
            self._errands[order.storage_id] = errand
            then()

        try:
            self._saver.tell(shot.image, self._message(order), job, heard)
        except Unavailable as e:
            self._do_without(e)
            return False
        return True

    def commit(self, order: Order, shot: Shot, job: Job) -> tuple[Manifest, bool]:
        """Make a checkpoint of it, in the helper, or here if there can be none.

        Returns:
            what it holds, and whether the reports before it are on the disk, too.
        """
        if self._saver is None:
            return self._commit_here(order, shot, job), False
        try:
            errand = self._errands.pop(order.storage_id, None)
            answer = errand.result() if errand else self._saver.ask(shot.image, self._message(order), job)
        except Unavailable as e:
            self._do_without(e)
            return self._commit_here(order, shot, job), False
        except BaseException as e:
            if isinstance(e, StorageError) or (saved := settle(self._directory, order.storage_id, order.owner)) is None:
                job.tick()  # if it was stopped, that is why
                raise
            return saved, False
        finally:
            self._prepared.pop(order.storage_id, None)
        return order.decode_outcome(answer), answer["flushed"]

    @property
    def _directory(self) -> DirectoryStore:
        assert isinstance(self._store, DirectoryStore)
        return self._store

    def _message(self, order: Order) -> dict[str, Any]:
        prepared = self._prepared.get(order.storage_id)
        return {"do": "commit", "root": self._store.root, "order": order, "prepared": prepared}

    def _commit_here(self, order: Order, shot: Shot, job: Job) -> Manifest:
        if self._prepared.pop(order.storage_id, None) is not None:
            settle(self._directory, order.storage_id, order.owner)
        return do_all(commit_image(self._directory, order, shot.image), self._ticking(job))

    def write(self, shot: Shot, path: str, job: Job) -> None:
        """Write the file to ``path``."""
        if self._saver is not None:
            message = {"do": "write", "root": self._store.root, "path": path, "contents": shot.contents}
            try:
                self._saver.ask(shot.image, message, job)
                return
            except Unavailable as e:
                self._do_without(e)
        do_all(write_image(self._store.disk, path, shot.image, shot.contents), self._ticking(job))

    def close(self) -> None:
        """End the helper, and give the memory back."""
        if self._saver is not None:
            self._saver.close()
        while self._all:
            self._all.pop().close()

    def _ticking(self, job: Job) -> Progress:
        def tick(done: int) -> None:
            job.tick()
            if done and self._progress is not None:
                self._progress(done)

        return tick

    def _do_without(self, why: Unavailable) -> None:
        self._saver = None
        log.warning("checkpoints are saved in the background by this process, as no other could be started: %s", why)


def serialized(state: Any) -> memoryview:
    """The bytes that ``torch.save`` writes."""
    torch = require("torch", extra="torch", purpose="checkpoint.save()")
    file = io.BytesIO()
    torch.save(state, file)
    return file.getbuffer()
