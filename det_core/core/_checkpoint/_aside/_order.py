"""What a background save is to do, told to the process that does it; and how it is done, in whichever process."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from det_core import _clock
from det_core.core._checkpoint._aside._archive import archive_of
from det_core.core._checkpoint._aside._image import Image
from det_core.errors import StorageError
from det_core.storage import (
    DirectoryStore,
    Disk,
    FileEntry,
    Header,
    Manifest,
    Owner,
    Progress,
    folders_of,
)
from det_core.storage._draft import Draft, draft, write_memory

log = logging.getLogger("det_core.checkpoint")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Contents:
    """What an image holds: storages and a pickle, laid out as :class:`Archive` says; or the file as it is."""

    storages: list[int]
    """Bytes of each."""
    pickled: int
    """Bytes."""
    whole: int = 0
    """Bytes of the file, if the image holds all of it; 0: it does not."""


@dataclass(frozen=True)
class Order:
    """A checkpoint of one file to be saved from an image."""

    storage_id: str
    name: str
    """The file's path in the checkpoint."""
    contents: Contents
    run_id: str
    restart: int
    ordinal: int
    steps_completed: int
    owner: Owner
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, body: dict[str, Any]) -> Order:
        """From what JSON makes of one."""
        return cls(**{**body, "contents": Contents(**body["contents"]), "owner": Owner(**body["owner"])})

    @property
    def folders(self) -> list[str]:
        """The folders in the checkpoint."""
        return sorted(folders_of([self.name]))

    def header(self, time: str) -> Header:
        """What the manifest says of the checkpoint, committed at ``time``."""
        return Header(self.run_id, self.restart, self.ordinal, time, self.steps_completed, self.storage_id)

    def encode_outcome(self, manifest: Manifest) -> dict[str, Any]:
        """What the process that asked does not know of the checkpoint that was made of it, for JSON."""
        assert manifest.header is not None
        files = {path: [entry.size, entry.digests] for path, entry in manifest.files.items()}
        return {"time": manifest.header.time, "files": files}

    def decode_outcome(self, outcome: dict[str, Any]) -> Manifest:
        """The checkpoint that was made of it, from what JSON makes of :meth:`encode_outcome`."""
        files = {path: FileEntry(size, tuple(digests)) for path, (size, digests) in outcome["files"].items()}
        return Manifest(files, tuple(self.folders), self.header(outcome["time"]))


Steps = Generator[int, None, Result]
"""Work that yields the number of bytes done since it did before; what it returns is the outcome."""


def do_all(steps: Steps[Result], progress: Progress | None = None) -> Result:
    """Do all steps, telling ``progress`` after each; what that raises stops the work."""
    try:
        while True:
            done = next(steps)
            if progress is not None:
                progress(done)
    except StopIteration as e:
        return e.value  # type: ignore[no-any-return]
    except BaseException as e:
        steps.close()
        _let_go(e)
        raise


def _let_go(error: BaseException | None) -> None:
    """Have an error, which may be kept for long, not keep the memory that it was raised about."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def write_image(disk: Disk, path: str, image: Image, contents: Contents) -> Steps[FileEntry]:
    """Write the file that an image holds to ``path``; raises StorageError."""
    parts = yield from _parts(image, contents)
    return (yield from write_memory(disk, path, parts))


def commit_image(store: DirectoryStore, order: Order, image: Image, begun: Draft | None = None) -> Steps[Manifest]:
    """Make a checkpoint from an image, durable before it is listed; if that fails nothing is left."""
    begun = begun or draft(store, order.storage_id, order.owner, order.name, order.metadata)
    try:
        entry = yield from _write(begun, image, order.contents)
        return begun.commit(entry, order.header(_clock.iso(_clock.now())))
    except BaseException:
        try:
            begun.abort()
        except StorageError as e:  # there is something that matters more
            log.warning("what was written of checkpoint %s could not be removed: %s", order.storage_id, e)
        raise


def _write(draft: Draft, image: Image, contents: Contents) -> Steps[FileEntry]:
    """A frame of its own has the memory: a logged error may keep those that were there before it."""
    parts = yield from _parts(image, contents)
    return (yield from draft.write(parts))


def _parts(image: Image, contents: Contents) -> Steps[list[memoryview | bytes]]:
    """The file that an image holds."""
    if contents.whole:
        return [memoryview(image.memory(contents.whole))[: contents.whole]]
    archive = archive_of(tuple(contents.storages), contents.pickled)
    memory = memoryview(image.memory(archive.end))
    rest = yield from archive.seal(memory)
    return [memory[: archive.end], rest]
