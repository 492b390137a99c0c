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
has an ``exit.json`` once all files that are named beside it are there in full length, or are given up.
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
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._supervisor._program import EXIT

MAX_PIECE_BYTES = 1 << 20
PROCESSES = "processes"
_DELIVERED = "exit.delivered"
"""Name of ``exit.json`` until the files that are named in it have come."""
_LOG = re.compile(r"log/([0-9]{1,5})\.supervisor\.(?:0|[1-9][0-9]{0,17})")
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
    if log := _LOG.fullmatch(name):
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
        self._own = AllocationFolder(folder.path / "nodes" / str(node)) if node else folder

    def take(self, name: str, data: bytes, *, offset: int = 0, digest: str | None = None) -> int:
        """Take a piece of a file, or a whole one.

        Args:
            name: Name out of the closed list.
            data: Its bytes.
            offset: Place of their first one in a file that is delivered at offsets.
            digest: SHA-256 of a file that is delivered whole.

        Returns:
            The size of the file in this copy. If it is less than the offset, the piece was not taken, because of the
            hole before it: the bytes from there are to be sent.

        Raises:
            Invalid: If the name is not in the list, the digest is another, or the content is none.
            TooMuch: If the piece is too large.
            Conflict: If another end was delivered before.
            OSError: If it cannot be written.
        """
        if len(data) > MAX_PIECE_BYTES:
            raise TooMuch(f"{name}: a piece has {len(data)} bytes, and may have {MAX_PIECE_BYTES}")
        is_whole = name in (PROCESSES, EXIT)
        if not is_whole and not is_appended(name, self._node):
            raise Invalid(f"node {self._node} does not deliver a file {name!r}")
        if is_whole and digest != hashlib.sha256(data).hexdigest():
            raise Invalid(f"{name}: the digest is not that of its content")
        with self._lock():
            size = len(data)
            if name == PROCESSES:
                self._take_processes(data)
            elif name == EXIT:
                self._take_exit(data)
            elif self._own.exit() is not None:
                size = _size(self._shared / name)
            else:
                path = self._shared / name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                size = _append(path, data, offset)
            self._end_if_complete()
            return size

    def give_up(self) -> None:
        """Wait for no more files: what has not come is lost for good."""
        with self._lock(), suppress(FileNotFoundError):
            self._end(json.loads((self._own.path / _DELIVERED).read_bytes())["exit"])

    def missing(self) -> dict[str, int] | None:
        """Return how many bytes are there of the files that have not come whole; None before the end was delivered."""
        try:
            sizes = json.loads((self._own.path / _DELIVERED).read_bytes())["sizes"]
        except FileNotFoundError:
            return {} if self._own.exit() is not None else None
        here = {name: _size(self._shared / name) for name in sizes}
        return {name: size for name, size in here.items() if size < sizes[name]}

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._own.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._own.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _take_processes(self, data: bytes) -> None:
        # It grows: an older one that comes late lacks the script.
        if "script" not in self._own.processes():
            write_atomic(self._own.path / PROCESSES, data, durable=False)

    def _take_exit(self, data: bytes) -> None:
        content = _parse(data)
        path = self._own.path / _DELIVERED
        before = self._own.exit()
        if before is None and path.exists():
            before = json.loads(path.read_bytes())["exit"]
        if before is None:
            write_atomic(path, data)
        elif before != content["exit"]:
            raise Conflict(f"{EXIT}: another end was delivered before")

    def _end_if_complete(self) -> None:
        if self.missing() == {} and self._own.exit() is None:
            content = json.loads((self._own.path / _DELIVERED).read_bytes())
            for name in content["sizes"]:
                _sync(self._shared / name)
            self._end(content["exit"])

    def _end(self, facts: Mapping[str, Any]) -> None:
        write_atomic(self._own.path / EXIT, json.dumps(facts).encode())
        os.unlink(self._own.path / _DELIVERED)


def _append(path: Path, data: bytes, offset: int) -> int:
    """Append what of a piece is new; return the size of the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if 0 <= offset <= size:
            rest = memoryview(data)[size - offset :]
            while rest:
                count = os.write(fd, rest)
                size += count
                rest = rest[count:]
        return size
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _sync(path: Path) -> None:
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(str(path.parent))


def _parse(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as e:
        raise Invalid(f"{EXIT}: not JSON: {e}") from None
    if isinstance(content, dict) and isinstance(content.get("exit"), dict) and isinstance(content.get("sizes"), dict):
        names = [name for name in content["sizes"] if _LOG.fullmatch(name) or _JOURNAL.fullmatch(name)]
        if len(names) == len(content["sizes"]) and all(type(size) is int for size in content["sizes"].values()):
            return content
    raise Invalid(f"{EXIT}: expected the end and the final sizes of all other files")
