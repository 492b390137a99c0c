"""The folder of an allocation: all that the engine and the supervisor know of it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from det_core._standalone.files import write_atomic
from det_core.master.engines._protocol import Ticket
from det_core.master.engines._supervisor._program import EXIT, take_room, write_exit
from det_core.master.engines._supervisor._segments import LOG

_PARTS = ("info", "work", "journal", "stage")


class AllocationFolder:
    """One allocation on disk.

    Args:
        path: ``<home>/master/allocations/<allocation id>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / LOG
        self.journal = path / "journal"

    def create(self, ticket: Ticket, place: int) -> None:
        """Make the folder and write down what is to run.

        Raises:
            FileExistsError: If an allocation of this ID was launched before.
            OSError: it cannot be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # the master may have written a line to its log
        for part in _PARTS:
            (self.path / part).mkdir()
        take_room(str(self.path))
        (self.path / "ticket.json").write_text(json.dumps({**asdict(ticket), "code": "", "place": place}))

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

    def ticket(self) -> dict[str, Any]:
        """What was launched; empty if that was never written down."""
        return _read(self.path / "ticket.json")

    @property
    def place(self) -> int | None:
        """Which ports it has."""
        place = self.ticket().get("place")
        return place if isinstance(place, int) else None

    def processes(self) -> dict[str, Any]:
        """Return who runs it, as the supervisor wrote it; empty before that, and without what cannot be from it."""
        found = _read(self.path / "processes")
        return {name: who for name, who in found.items() if _is_process(who) or (name == "boot" and type(who) is str)}

    def exit(self) -> dict[str, Any] | None:
        """How it ended, once that is written."""
        return _read(self.path / EXIT) or None

    def write_exit(self, **facts: object) -> None:
        """Write how it ended, where no supervisor could."""
        write_exit(str(self.path), {"status": None, "signal": None, "killed": False, "started": False, **facts})

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

    def order_kill(self, seconds: float) -> None:
        """Order the supervisor to end the allocation in this many seconds; an earlier deadline stands.

        Raises:
            OSError: If the order cannot be written.
        """
        order = self.path / "kill"
        number = 0
        with suppress(OSError, ValueError, IndexError):
            number = int(order.read_text().split()[0])
        write_atomic(order, f"{number + 1} {max(seconds, 0.0):.3f}\n".encode(), durable=False)

    @property
    def has_only_log(self) -> bool:
        """Whether nothing but a log is there: of an allocation that was forgotten, or that was not launched yet."""
        return all(entry.name == LOG for entry in _entries(self.path))

    def remove(self) -> None:
        """Delete the folder."""
        _delete(self.path)

    def remove_all_but_log(self) -> None:
        """Delete what an ended allocation does not need; its log stays until its experiment is deleted."""
        for entry in _entries(self.path):
            if entry.name == LOG:
                continue
            if entry.is_dir(follow_symlinks=False):
                _delete(Path(entry.path))
            else:
                os.unlink(entry.path)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _delete(path: Path) -> None:
    """Delete a directory, also where a script took our permission from its parts."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for folder, _, _ in os.walk(path):
            with suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(path)


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


def _is_process(who: Any) -> bool:
    """Return whether this is a process ID with a start time."""
    if type(who) is not list or len(who) != 2:
        return False
    pid, started = who
    return type(pid) is int and 0 < pid < 2**31 and (started is None or type(started) is int)
