"""What a background save is to do, told to the process that does it; and how it is done, in whichever process."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from det_core import _clock
from det_core.core._checkpoint._agree import remove
from det_core.core._checkpoint._aside._archive import archive_of
from det_core.core._checkpoint._aside._image import Image
from det_core.storage import (
    DirectoryStaging,
    DirectoryStore,
    Disk,
    FileEntry,
    Header,
    Manifest,
    Owner,
    Progress,
    folders_of,
    write_memory,
)  # fmt: skip

Result = TypeVar("Result")


@dataclass(frozen=True)
class Contents:
    """What an image holds: storages and a pickle, laid out as :class:`Archive` says; or the file as it is."""

    storages: list[int]
    """Bytes of each."""
    pickled: int
    """Bytes."""
    whole: int | None = None
    """Bytes of the file, if the image holds all of it."""


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


def do_all(steps: Steps[Result], progress: Progress) -> Result:
    """Do all steps, telling ``progress`` after each; what that raises stops the work."""
    try:
        while True:
            progress(next(steps))
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
    if contents.whole is not None:
        memory = memoryview(image.memory(contents.whole))
        return (yield from write_memory(disk, path, [memory[: contents.whole]]))
    archive = archive_of(tuple(contents.storages), contents.pickled)
    memory = memoryview(image.memory(archive.end))
    rest = yield from archive.seal(memory)
    return (yield from write_memory(disk, path, [memory[: archive.end], rest]))


def commit_image(
    store: DirectoryStore, order: Order, image: Image, staging: DirectoryStaging | None = None
) -> Steps[Manifest]:
    """Make a checkpoint from an image, durable before it is listed; if that fails nothing is left."""
    staging = staging or store.begin(order.storage_id, order.owner, alone=True)
    try:
        entry = yield from write_image(store.disk, f"{staging.folder}/{order.name}", image, order.contents)
        header = order.header(_clock.iso(_clock.now()))
        return staging.commit({order.name: entry}, order.folders, order.metadata, header, unsynced=[order.name])
    except BaseException:
        remove(staging)
        raise
