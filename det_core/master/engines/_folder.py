"""The folder of an allocation: all that the engine and the supervisor know of it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from det_core._info import canonical_url
from det_core._standalone.files import write_atomic
from det_core.journal import open_cursors
from det_core.master.engines._protocol import Ticket
from det_core.master.engines._supervisor._log import LOG
from det_core.master.engines._supervisor._program import EXIT, PROCESSES, START, take_room, write_exit

DELIVERED = "exit.delivered"
"""Name of an ``exit.json`` from a machine elsewhere until the files that are named in it have come."""


class AllocationFolder:
    """One allocation on disk.

    Args:
        path: ``<home>/master/allocations/<allocation id>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / LOG
        self.journal = path / "journal"

    def create(self, ticket: Ticket) -> None:
        """Make the folder and write down what is to run.

        Raises:
            FileExistsError: If an allocation of this ID was launched before.
            OSError: If it cannot be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # the master may have written a line to its log
        for part in ("info", "work", "journal", "stage"):
            (self.path / part).mkdir()
        # A disk that is full at the end would make a completed run a lost one.
        take_room(str(self.path))
        # Without the code, which the script must not read.
        (self.path / "ticket.json").write_text(json.dumps({**asdict(ticket), "code": ""}))

    def write_start(self, command: list[str], environment: Mapping[str, str], node: int = 0) -> None:
        """Write what the supervisor is to run, as which node.

        Raises:
            ValueError: If a word or a variable has a NUL in it.
        """
        # The supervisor would fail at it, when nobody waits for an answer any more.
        if any("\0" in word for words in (command, environment, environment.values()) for word in words):
            raise ValueError("the command or a variable has a NUL character")
        (self.path / START).write_text(json.dumps({"command": command, "environment": dict(environment), "node": node}))

    def ticket(self) -> dict[str, Any]:
        """Return what was launched; empty if that was never written down."""
        return _read(self.path / "ticket.json")

    def processes(self) -> dict[str, Any]:
        """Return who runs it, as the supervisor wrote it; empty before that, and without what cannot be from it."""
        content = _read(self.path / PROCESSES)
        return {name: who for name, who in content.items() if _is_process(who) or (name == "boot" and type(who) is str)}

    def exit(self) -> dict[str, Any] | None:
        """Return how it ended; None before that is written."""
        return _read(self.path / EXIT) or None

    def delivery(self) -> dict[str, Any]:
        """Return the ``exit`` that a machine elsewhere delivered, and ``sizes`` of files of which some are missing."""
        return _read(self.path / DELIVERED)

    def of_node(self, node: int) -> AllocationFolder:
        """Return the folder with the processes and the end of a node; logs and journals of all are in this one."""
        return AllocationFolder(self.path / "nodes" / str(node)) if node else self

    def write_exit(self, **facts: object) -> None:
        """Write how it ended, where no supervisor could."""
        write_exit(str(self.path), {"status": None, "signal": None, "killed": False, "started": False, **facts})

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Yield the locked file, to be given to the supervisor, which then holds the lock.

        Raises:
            BlockingIOError: If a supervisor lives.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A high number, as the supervisor's own descriptors are put over the low ones.
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
        finally:
            os.close(fd)
        try:
            fcntl.flock(high, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield high
        finally:
            os.close(high)

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
        # A higher number tells the supervisor that the order is another one.
        order = self.path / "kill"
        number = 0
        with suppress(OSError, ValueError, IndexError):
            number = int(order.read_text().split()[0])
        write_atomic(order, f"{number + 1} {max(seconds, 0.0):.3f}\n".encode(), durable=False)

    def read_journals(self, *, alive: bool = False) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
        """Yield restart, rank and records as they stand in the files, in order, of every process that wrote some.

        They count as handed over when the next ones are asked for. A line that is not a record is given as
        ``{"damaged": line}``, for whoever keeps what cannot be taken.

        Args:
            alive: Whether the processes go on, and keep account of what they ship themselves: then these are the
                records that they had not shipped a moment ago, and damaged lines are left to them.
        """
        if not self.journal.is_dir():
            return
        to = f"{canonical_url(self.ticket().get('master_url') or 'http://127.0.0.1')} {self.path.name}"
        for cursor in open_cursors(self.journal, to=to):
            while (lines := cursor.read()) or cursor.damaged:
                records = [line.record for line in lines]
                if not alive:
                    records += [{"damaged": line.decode(errors="backslashreplace")} for line in cursor.damaged]
                if records:
                    yield cursor.restart, cursor.rank, records
                cursor.advance(lines)
                if not alive:
                    with suppress(OSError):  # then they are handed over once more if the master dies now
                        cursor.save()

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


def delete_folders(allocations: Path, task_ids: Collection[str]) -> None:
    """Delete the folders of all allocations of tasks.

    Raises:
        OSError: If one cannot be deleted.
    """
    for entry in _entries(allocations):
        if entry.name.rpartition(".")[0] in task_ids:
            _delete(Path(entry.path))


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


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content


def _is_process(who: Any) -> bool:
    """Return whether this is a process ID with a start time."""
    if type(who) is not list or len(who) != 2:
        return False
    pid, started = who
    return type(pid) is int and 0 < pid < 2**31 and (started is None or type(started) is int)
