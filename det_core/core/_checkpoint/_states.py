"""States of torch saved in the background: a snapshot in memory, and whoever writes it."""

from __future__ import annotations

import io
import logging
from typing import Any, NamedTuple

from det_core._optional import require
from det_core.core._checkpoint._background import Job
from det_core.core._checkpoint._image import Image
from det_core.core._checkpoint._order import Contents, Order, commit_image, do_all, write_image
from det_core.core._checkpoint._saver import Saver, Unavailable
from det_core.storage import DirectoryStore, Manifest, Progress, Store

log = logging.getLogger("det_core.checkpoint")


class Shot(NamedTuple):
    """A state as it was, in memory of its own."""

    snapshots: Any
    contents: Contents

    @property
    def image(self) -> Image:
        """The memory."""
        return self.snapshots.image  # type: ignore[no-any-return]


class States:
    """What saves states for one context.

    Args:
        store: where checkpoints lie.
        progress: told of the bytes that are written in this process.
    """

    def __init__(self, store: Store, progress: Progress | None = None) -> None:
        self._store = store
        self._progress = progress
        self._saver: Saver | None = Saver()
        self._free: list[Any] = []
        self.direct = isinstance(store, DirectoryStore) and store.shared
        """Whether another process can commit to the store."""

    def snapshot(self, state: Any) -> Shot:
        """Copy a state; on return it may be changed.

        Raises:
            OSError: there is no memory for it.
            Exception: it cannot be pickled.
        """
        from det_core.core._checkpoint._snapshot import Snapshots, Unusual

        snapshots = self._free.pop() if self._free else Snapshots(Image())
        try:
            return Shot(snapshots, snapshots.take(state))
        except Unusual as e:
            log.debug("torch.save itself has to save this state: %s", e)
            return Shot(snapshots, snapshots.put(serialized(state)))
        except BaseException:
            snapshots.image.close()
            raise

    def commit(self, order: Order, shot: Shot, job: Job) -> Manifest:
        """Make a checkpoint of it, in the helper, or here if there can be none. Then its memory is free again."""
        try:
            if self.direct and self._saver is not None:
                return self._commit_there(self._saver, order, shot, job)
            return self._commit_here(order, shot, job)
        finally:
            self._free.append(shot.snapshots)

    def _commit_there(self, saver: Saver, order: Order, shot: Shot, job: Job) -> Manifest:
        store = self._store
        assert isinstance(store, DirectoryStore)
        message = {"do": "commit", "root": store.root, "order": order}
        job.urgent = saver.hurry
        try:
            answer = saver.ask(shot.image, message, job.tick)
        except Unavailable as e:
            self._do_without(e)
            return self._commit_here(order, shot, job)
        except BaseException:
            saved = store.settle(order.storage_id, order.owner)
            if saved is None:
                raise
            return saved
        return Manifest.decode(answer["manifest"].encode(), f"checkpoint {order.storage_id}")

    def _commit_here(self, order: Order, shot: Shot, job: Job) -> Manifest:
        return do_all(commit_image(self._store, order, shot.image), self._ticking(job))

    def write(self, shot: Shot, path: str, job: Job) -> None:
        """Write the file; then its memory is free again."""
        try:
            if self._saver is not None:
                message = {"do": "write", "root": self._store.root, "path": path, "contents": shot.contents}
                job.urgent = self._saver.hurry
                try:
                    self._saver.ask(shot.image, message, job.tick)
                    return
                except Unavailable as e:
                    self._do_without(e)
            do_all(write_image(self._store.disk, path, shot.image, shot.contents), self._ticking(job))
        finally:
            self._free.append(shot.snapshots)

    def close(self) -> None:
        """End the helper, and give the memory back."""
        if self._saver is not None:
            self._saver.close()
        while self._free:
            self._free.pop().image.close()

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
