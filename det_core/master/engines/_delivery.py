"""Delivery of an allocation's files from a machine that does not share the master's folders.

The folder of an allocation is the protocol between a supervisor and the master. A machine elsewhere sends the files of
its folder, and the master's copy of them is read like a folder of this machine. Names are from a closed list:

====================================  ==================================================================
``log/NODE.supervisor.START``         output of the script: bytes at an offset in this segment
``journal/journal-RESTART-RANK….jsonl``  records of a process: bytes at an offset
``processes``                         who runs, whole, with its SHA-256
``exit.json``                         how it ended, whole, with its SHA-256: :func:`pack_exit`
====================================  ==================================================================

Pieces may come late, repeatedly and in any order: what is there already is ignored, and a hole is asked for. The copy
has an ``exit.json`` once all files that are named beside it are there in full length. If some are lost for good, the
end that was delivered counts without them; see :class:`~det_core.master.engines._verdict.Files`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from det_core._standalone.files import sync_folder, write_atomic
from det_core.master._errors import Conflict, Invalid, TooMuch
from det_core.master.engines._folder import DELIVERED, AllocationFolder
from det_core.master.engines._protocol import Piece
from det_core.master.engines._supervisor._log import LOG, find_middle, find_segments, segment_name
from det_core.master.engines._supervisor._program import EXIT, PROCESSES

MAX_PIECE_BYTES = 1 << 20
_SEGMENT = re.compile(r"log/([0-9]{1,5})\.supervisor\.(?:0|[1-9][0-9]{0,17})")
_JOURNAL = re.compile(r"journal/journal-[0-9]{1,9}-[0-9]{1,9}(?:\.[0-9]{1,9})?\.jsonl")


def pack_exit(facts: Mapping[str, Any], sizes: Mapping[str, int]) -> bytes:
    """Return the ``exit.json`` to deliver.

    Args:
        facts: Content of the ``exit.json`` that the supervisor wrote.
        sizes: Final sizes of all files that are delivered at offsets, by name.
    """
    return json.dumps({"exit": dict(facts), "sizes": dict(sizes)}).encode()


def digest(data: bytes) -> str:
    """Return the SHA-256 of a whole file, as it is delivered with it."""
    return hashlib.sha256(data).hexdigest()


def is_appended(name: str, node: int) -> bool:
    """Return whether a name is one that a node delivers at offsets."""
    if log := _SEGMENT.fullmatch(name):
        return int(log[1]) == node
    return _JOURNAL.fullmatch(name) is not None


class Copy:
    """The master's copy of the files of one node. Any threads and processes may call it at a time.

    Args:
        folder: The master's folder of the allocation; it need not exist yet.
        node: Rank of the node.
    """

    def __init__(self, folder: AllocationFolder, node: int = 0) -> None:
        self._shared = folder.path
        self._node = node
        self._own = folder.of_node(node)

    def take(self, piece: Piece) -> int:
        """Take a piece of a file, or a whole one.

        Returns:
            The size of the file in this copy. If it is less than the offset, the piece was not taken, because of the
            hole before it: the bytes from there are to be sent.

        Raises:
            Invalid: If the name is not in the list, the digest is another, or the content is none.
            TooMuch: If the piece is too large.
            Conflict: If another end was delivered before.
            OSError: If it cannot be written.
        """
        name = piece.name
        size = len(piece.data)
        if size > MAX_PIECE_BYTES:
            raise TooMuch(f"{name}: a piece has {size} bytes, and may have {MAX_PIECE_BYTES}")
        is_whole = name in (PROCESSES, EXIT)
        if not is_whole and not is_appended(name, self._node):
            raise Invalid(f"node {self._node} does not deliver a file {name!r}")
        if is_whole and piece.digest != digest(piece.data):
            raise Invalid(f"{name}: the digest is not that of its content")
        with self._lock():
            if name == PROCESSES:
                # It grows: an older one that comes late lacks the script.
                if "script" not in self._own.processes():
                    write_atomic(self._own.path / PROCESSES, piece.data, durable=False)
            elif name == EXIT:
                self._take_exit(piece.data)
            # The end has been delivered with the final sizes: what comes now is a repeat.
            elif self._own.exit() is not None:
                size = _size(self._shared / name)
            else:
                size = _append(self._shared / name, piece)
                if piece.offset == 0:
                    self._delete_middle()
            self._end_if_complete()
            return size

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._own.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A directory can be locked, too, so that no lock file lies among what was delivered.
        fd = os.open(self._own.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _delete_middle(self) -> None:
        """Delete segments of a long log, as the machine has done before it sent a newer one."""
        directory = self._shared / LOG
        starts = find_segments(str(directory)).get((self._node, "supervisor"), [0])
        for start in find_middle(starts):
            os.unlink(directory / segment_name(self._node, "supervisor", start))

    def _take_exit(self, data: bytes) -> None:
        content = self._parse_exit(data)
        before = self._own.exit() or self._own.delivery().get("exit")
        if before is None:
            write_atomic(self._own.path / DELIVERED, json.dumps(content).encode())
        elif before != content["exit"]:
            raise Conflict(f"{EXIT}: another end was delivered before")

    def _parse_exit(self, data: bytes) -> dict[str, Any]:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(data)
            sizes = content["sizes"].items()
            is_known = all(is_appended(name, self._node) and type(size) is int for name, size in sizes)
            if is_known and isinstance(content["exit"], dict):
                return {"exit": content["exit"], "sizes": dict(sizes)}
        raise Invalid(f"{EXIT}: expected the end and the final sizes of all other files")

    def _end_if_complete(self) -> None:
        delivery = self._own.delivery()
        sizes = {self._shared / name: size for name, size in delivery.get("sizes", {}).items()}
        if delivery and all(_size(path) >= size for path, size in sizes.items()):
            # All of it is durable before the end is, which lets the master forget the machine.
            for path in sizes:
                _sync(path)
            write_atomic(self._own.path / EXIT, json.dumps(delivery["exit"]).encode())
            os.unlink(self._own.path / DELIVERED)


def _append(path: Path, piece: Piece) -> int:
    """Append what of a piece is new; return the size of the file."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # O_NOFOLLOW: a link in its place could lead out of the folder.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if 0 <= piece.offset <= size:
            # What is there already is a repeat.
            rest = memoryview(piece.data)[size - piece.offset :]
            while rest:
                count = os.write(fd, rest)
                size += count
                rest = rest[count:]
        return size
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    # A script may put anything in a file's place; what is no regular file counts as missing.
    if not stat.S_ISREG(status.st_mode):
        return 0
    return status.st_size


def _sync(path: Path) -> None:
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(str(path.parent))
