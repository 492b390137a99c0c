"""The folder of an allocation: all that the engine and the supervisor know of it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from det_core.master.engines._protocol import LaunchSpec
from det_core.master.engines._supervisor._end import EXIT, PROCESSES, write_end

_PARTS = ("info", "work", "journal", "stage")


class AllocationFolder:
    """One allocation on disk.

    Args:
        path: ``<home>/master/allocations/<allocation id>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log.jsonl"
        self.journal = path / "journal"

    def create(self, spec: LaunchSpec, place: int) -> None:
        """Make the folder and write down what is to run.

        Raises:
            FileExistsError: there is one already.
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        for part in _PARTS:
            (self.path / part).mkdir()
        known = {**asdict(spec), "context": str(spec.context) if spec.context else None, "place": place}
        (self.path / "spec.json").write_text(json.dumps(known, default=str))

    def write_words(self, name: str, words: Mapping[str, str] | Any) -> None:
        """Write a list of words, or of variables, for the supervisor.

        Raises:
            ValueError: one has a NUL in it.
        """
        items = [f"{k}={v}" for k, v in words.items()] if isinstance(words, Mapping) else list(words)
        data = b"\0".join(os.fsencode(item) for item in items)
        if data.count(b"\0") != max(len(items) - 1, 0):
            raise ValueError(f"a NUL character in the {name}")
        (self.path / name).write_bytes(data)

    def spec(self) -> dict[str, Any]:
        """What was launched; empty if that was never written down."""
        return _read(self.path / "spec.json")

    @property
    def place(self) -> int | None:
        """Which ports it has."""
        place = self.spec().get("place")
        return place if isinstance(place, int) else None

    def processes(self) -> dict[str, Any]:
        """Who runs it, as the supervisor wrote it; empty before that."""
        return _read(self.path / PROCESSES)

    def exit(self) -> dict[str, Any] | None:
        """How it ended, once that is written."""
        return _read(self.path / EXIT) or None

    def write_exit(self, **facts: object) -> None:
        """Write how it ended, where no supervisor could."""
        write_end(str(self.path), {"status": None, "signal": None, "killed": False, **facts})

    @contextmanager
    def lock(self) -> Iterator[int]:
        """The locked file, to be handed to the supervisor, which then holds the lock.

        Raises:
            BlockingIOError: a supervisor lives.
        """
        fd = _high(os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd
        finally:
            os.close(fd)

    @property
    def is_live(self) -> bool:
        """Whether a supervisor lives, or is being born."""
        try:
            with self.lock():
                return False
        except BlockingIOError:
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False

    @contextmanager
    def control(self) -> Iterator[int]:
        """The socket on which the supervisor is told things; made here, so that it hears also what is said early."""
        with self._near("control") as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind(path)
            fd = _high(server.detach())
            try:
                yield fd
            finally:
                os.close(fd)

    def tell(self, message: str) -> bool:
        """Say something to the supervisor; False if none hears."""
        try:
            with self._near("control") as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
                client.setblocking(False)
                client.sendto(message.encode(), path)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            for folder, _, _ in os.walk(self.path):
                with suppress(OSError):
                    os.chmod(folder, 0o700)
            shutil.rmtree(self.path)

    @contextmanager
    def _near(self, name: str) -> Iterator[str]:
        """A short path of a file in the folder: a socket's may have 107 bytes."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/{name}"
        finally:
            os.close(fd)


def _high(fd: int) -> int:
    """The same file under a number that a supervisor's own descriptors do not have."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(fd)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
