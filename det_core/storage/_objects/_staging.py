"""A checkpoint being written to an object store: objects that are not listed before the manifest is put."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core.errors import StorageError
from det_core.storage._copy import Job, Progress
from det_core.storage._io import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest, encode_metadata
from det_core.storage._names import MANIFEST, METADATA
from det_core.storage._objects._door import Door
from det_core.storage._objects._keys import ASIDE, folder_of, mark_body, parse_writer_mark, writer_mark
from det_core.storage._objects._run import run
from det_core.storage._objects._upload import upload
from det_core.storage._owner import Owner
from det_core.storage._scan import Listing
from det_core.storage._staging import DirectoryStaging

log = logging.getLogger("det_core.storage")


class ObjectStaging:
    """``<root>/<storage_id>/…``, and a mark of each process that writes there.

    What a script writes into :attr:`path` lies on this machine, in a scratch folder, until the end.

    Args:
        door: to the bucket.
        disk: to this machine's file system.
        scratch: where scratch folders are made.
        storage_id: the checkpoint's name.
        ticket: what the others join with: the name of the chief's mark.
        part: the rank; None: there is one writer.
        owner: this process.
        left: told the key of its mark if it could not be aborted.
        taken: another checkpoint has this name, of which nothing may be touched.
    """

    def __init__(
        self,
        door: Door,
        disk: Disk,
        scratch: str,
        storage_id: str,
        ticket: str,
        part: int | None,
        owner: Owner,
        left: Callable[[str], None],
        *,
        taken: bool = False,
    ) -> None:
        self._door, self._disk = door, disk
        self._folder = folder_of(storage_id)
        self._mark = writer_mark(storage_id, owner.tag)
        self._owner = owner
        self._left = left
        self._chief = not part
        self._taken = taken
        name = f"{storage_id}-{'whole' if part is None else part}.{owner.tag}"
        self._local = DirectoryStaging(disk, scratch, name, storage_id, 0)
        self._shares_mark = self._marked = f"{storage_id}.{owner.tag}" == ticket
        self._putting: set[str] = set()
        self._unanswered = False
        self._open = True
        self.ticket = ticket
        self.storage_id = storage_id

    @property
    def path(self) -> Path:
        """This rank's scratch folder, made on first use."""
        return self._local.path

    def written(self) -> Listing:
        """What the scratch folder holds; links, and files that have other names, became copies of their own."""
        return self._local.written()

    def local(self, name: str) -> Path | None:
        """In the scratch folder, which stays until the end."""
        return self._local.local(name)

    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Put the files of a folder that is not ours."""
        return self._put(listing, progress)

    def take(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Put files of the scratch folder."""
        return self._put(listing, progress)

    def _put(self, listing: Listing, progress: Progress | None) -> dict[str, FileEntry]:
        self._refuse_if_taken("write")
        jobs = [Job(p, s.path, s.size, self._folder + p) for p, s in listing.files.items()]
        if jobs and not self._marked:
            run(self._door.where, lambda _: self._door.put(self._mark, mark_body(self._owner)))
            self._marked = True
        where = f"checkpoint {self.storage_id} in {self._door.where}"
        self._putting = {self._folder + path for path in listing.files}
        entries = upload(self._door, self._disk, where, jobs, progress, self._gave_up)
        self._putting = set()
        return entries

    def _gave_up(self) -> None:
        self._unanswered = True

    def commit(
        self, files: Mapping[str, FileEntry], directories: Sequence[str], metadata: Mapping[str, Any], header: Header
    ) -> Manifest:
        """Put metadata.json, see that every file is there, and put the manifest: from then on it is listed."""
        from xxhash import xxh3_128_hexdigest

        self._refuse_if_taken("commit")
        text = encode_metadata(metadata)
        entry = {METADATA: FileEntry(len(text), (xxh3_128_hexdigest(text),))}
        manifest = Manifest({**files, **entry}, tuple(directories), header)

        async def put_last() -> None:
            await self._door.put(self._folder + METADATA, text)
            listed = {found.key: found.size for found in await self._door.list(self._folder)}
            self._check_all_there(manifest, listed)
            await self._door.put(self._folder + MANIFEST, manifest.encode())

        try:
            run(self._door.where, lambda _: put_last())
        except BaseException as e:
            self._unanswered |= self._door.unsettled(e)
            raise
        self._open = False
        self._clear_up()
        return manifest

    def _check_all_there(self, manifest: Manifest, listed: Mapping[str, int]) -> None:
        """Whatever else happened to the store: no manifest names what is not there."""
        if self._folder + MANIFEST in listed:
            raise self._refused("commit", errno.EEXIST, "a checkpoint of that id is there")
        for path, entry in manifest.files.items():
            found = listed.get(self._folder + path)
            if found != entry.size:
                what = "is not there any more" if found is None else f"has {found} bytes instead of {entry.size}"
                raise self._refused("commit", errno.EIO, f"{path} {what}, though it was stored")

    def _clear_up(self) -> None:
        """The checkpoint is complete; of what goes wrong now nobody needs to know more than a warning."""

        async def remove_marks() -> None:
            prefix = f"{ASIDE}{self.storage_id}."
            found = [parse_writer_mark(entry.key) for entry in await self._door.list(prefix)]
            mine = [mark for mark in found if mark is not None and mark.storage_id == self.storage_id]
            await self._door.delete([writer_mark(mark.storage_id, mark.owner.tag) for mark in mine])

        try:
            run(self._door.where, lambda _: remove_marks())
            self._local.abort()
        except StorageError as e:
            log.warning("checkpoint %s is complete, but what served to write it stays: %s", self.storage_id, e)

    def abort(self) -> None:
        """Remove the scratch folder, and what was put: the chief all of it, another rank what it has not finished."""
        if not self._open:
            return
        self._open = False
        try:
            self._local.abort()
        finally:
            if not self._taken and (self._chief or self._putting):
                self._abort()

    def _abort(self) -> None:
        try:
            run(self._door.where, lambda _: self._remove())
        except BaseException:
            self._left(self._mark)
            raise
        if self._unanswered:
            self._left(self._mark)

    async def _remove(self) -> None:
        """The manifest goes first: a commit may have failed only because its answer was lost.

        A rank that has put all of its files leaves them to the chief, who may be committing them now. Its mark says
        that they are its own, should the chief have come to an end before.
        Where a request was given up, its object may appear after all: the mark stays for whoever collects next.
        """
        door = self._door
        if self._chief:
            await door.delete([self._folder + MANIFEST])
            keys = [entry.key for entry in await door.list(self._folder)]
        else:
            keys = sorted(self._putting)
        if keys:
            await door.delete(keys)
        if self._chief:
            await door.abort_stale(self._folder)
        if (self._chief or not self._shares_mark) and not self._unanswered:
            await door.delete([self._mark])

    def _refuse_if_taken(self, operation: str) -> None:
        if self._taken:
            raise self._refused(operation, errno.EEXIST, "a checkpoint of that id is there")

    def _refused(self, operation: str, number: int, why: str) -> StorageError:
        text = f"checkpoint store {self._door.where}: cannot {operation} {self.storage_id}: {why}"
        return StorageError(number, text)
