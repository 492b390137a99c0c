"""The directory of a run: ``<home>/runs/<run_id>/``, with run.json, the writer's lock, journals and checkpoints.

``run.json`` records each start: when, where and with which command. ``run.lock`` is locked by the process that writes
the run; the kernel releases a lock with its holder, so nothing needs to be cleaned up after a kill.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from det_core import _clock
from det_core._forks import ForkGuard
from det_core._json import is_number
from det_core._standalone.files import write_atomic
from det_core.errors import RunError, RunLocked, RunNotFound

logger = logging.getLogger("det_core")

INFO_FILE = "run.json"
LOCK_FILE = "run.lock"
LOCK_TIMEOUT = 1.0
"""Maximum wait for the lock in seconds: a killed holder may have been forking a child that has not released it yet."""
_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_JOURNAL = re.compile(r"journal-(\d{1,9})-(\d{1,9})(?:\.(\d{1,9}))?\.jsonl")
_FLOCK = "hhqqi4x"
_WRITE_LOCK = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""The lock: for writing, the whole file."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass
class RunFolder:
    """One run on disk.

    Attributes:
        path: the directory.
        run_id: its name: UTC time of creation and six random characters, so that names sort by age.
        name: the name by which ``latest`` finds it.
        restart: the restart that this process writes; -1 before :meth:`begin_restart`.
    """

    path: Path
    run_id: str
    name: str
    restart: int = -1
    _lock: WriterLock | None = field(default=None, repr=False, compare=False)

    @classmethod
    def create(cls, home: Path, *, name: str) -> RunFolder:
        """Create the directory of a new run.

        Args:
            home: the home directory; created if missing.
            name: the run's name.

        Raises:
            RunError: If the directory cannot be created; the message has path and cause.
        """
        from secrets import choice

        created = _clock.now()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(created))
        runs = Path(home) / "runs"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            while True:  # of a thousand runs that begin in one second, two may draw the same ID
                run_id = f"{stamp}-{''.join(choice(_ALPHABET) for _ in range(6))}"
                with suppress(FileExistsError):
                    (runs / run_id).mkdir()
                    break
            _write_info(runs / run_id, {"run_id": run_id, "name": name, "created": created, "restarts": []})
        except OSError as e:
            raise RunError(
                f"cannot create a run in {runs}: {e.strerror}; set DET_CORE_HOME to a directory you own"
            ) from None
        return cls(runs / run_id, run_id, name)

    @classmethod
    def open(cls, home: Path, run_id: str) -> RunFolder:
        """Return an existing run.

        Args:
            home: the home directory.
            run_id: the run's ID, or a beginning of it that no other ID has.

        Raises:
            RunNotFound: If no run has this ID, or several begin with it.
        """
        path = Path(home) / "runs" / run_id
        if not _ID.fullmatch(run_id) or not path.is_dir():
            paths = {path.name: path for path in run_paths(home)}
            path = paths[match_run_id(run_id, paths, Path(home, "runs"))]
        return cls(path, path.name, read_info(path, quietly=True).get("name", ""))

    @classmethod
    def latest(cls, home: Path, name: str) -> RunFolder | None:
        """Return the newest run called ``name``, or None."""
        for path in run_paths(home):
            if read_info(path).get("name") == name:
                return cls(path, path.name, name)
        return None

    def begin_restart(self, start: Mapping[str, Any] | None = None) -> int:
        """Lock the run for writing and record one more restart, durably.

        Args:
            start: further facts for run.json beside time, host and pid, such as ``argv``.

        Returns:
            The number of this restart, 0 for a new run.

        Raises:
            RunLocked: If another process writes the run; the message has host and pid.
            RunError: If the directory cannot be written.
        """
        try:
            lock = WriterLock(self.path / LOCK_FILE, self.run_id)
            try:
                self.restart = self._count_restart(start or {})
            except BaseException:
                lock.release()
                raise
        except OSError as e:
            raise RunError(f"cannot write run {self.run_id} in {self.path}: {e.strerror}") from e
        self._lock = lock
        for reserve in self.path.glob("journal-*.reserve"):  # left by processes that were killed
            with suppress(OSError):
                reserve.unlink()
        return self.restart

    def release(self) -> None:
        """Release the lock, so that another process can write the run. Releasing twice has no effect."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _count_restart(self, start: Mapping[str, Any]) -> int:
        now = _clock.now()
        # run.json may be missing or damaged: the journals alone make a run.
        info: dict[str, Any] = {"run_id": self.run_id, "name": self.name, "created": now, "restarts": []}
        info.update(read_info(self.path, quietly=True))
        restart = count_starts(self.path, info)
        if not restart:
            info["name"] = self.name
        begun = {"restart": restart, "time": now, "host": os.uname().nodename, "pid": os.getpid()}
        info["restarts"].append({**begun, **start})
        _write_info(self.path, info)
        return restart


class WriterLock:
    """The exclusive right to write a run. A forked child does not inherit it.

    It is an open-file-description lock. Unlike ``flock`` it can be queried without being taken, so listing runs never
    makes a writer fail; unlike a POSIX record lock it is not lost when another part of the process closes the file. It
    works on NFS and on Lustre.

    Args:
        path: file to lock; its content names the holder.
        run_id: ID of the run, for messages.

    Raises:
        RunLocked: If another process holds it; the message has host and pid.
        OSError: If the file cannot be written.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            if not self._acquire(path):
                raise RunLocked(
                    f"run {run_id} is being written by {_holder(path)}; wait for it to end, stop it, or start a new "
                    "run (without resume)"
                )
            holder = {"host": os.uname().nodename, "pid": os.getpid(), "time": _clock.now()}
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(holder).encode(), 0)
        except BaseException:
            self.release()
            raise
        _locks.add(self)

    def release(self) -> None:
        """Release the lock. Releasing twice has no effect."""
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)

    def _acquire(self, path: Path) -> bool:
        deadline = _clock.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)
                return True
            except OSError as e:
                if e.errno in _NO_LOCKS:
                    logger.warning("cannot lock %s (%s): a second process could write this run too", path, e.strerror)
                    return True
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if _clock.monotonic() > deadline:
                return False
            time.sleep(0.01)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keep every other process from writing the run during the block.

    Raises:
        RunLocked: If a process is writing it.
    """
    lock = WriterLock(folder / LOCK_FILE, folder.name)
    try:
        yield
    finally:
        lock.release()


def is_live(folder: Path) -> bool:
    """Return whether a process is writing the run, without taking its lock."""
    file = open_file(folder / LOCK_FILE)
    if file is None:
        return False
    with file:
        try:
            lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WRITE_LOCK)
        except OSError:  # a file system without locks
            return False
    return bool(struct.unpack(_FLOCK, lock)[0] != fcntl.F_UNLCK)


def run_paths(home: Path) -> list[Path]:
    """Return the directories of all runs, newest first.

    Raises:
        RunError: If they cannot be listed.
    """
    runs = Path(home) / "runs"
    try:
        names = [entry.name for entry in os.scandir(runs) if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise RunError(f"cannot list runs in {runs}: {e.strerror}; set DET_CORE_HOME to a directory you own") from None
    return sorted((runs / name for name in names if _ID.fullmatch(name)), key=_age, reverse=True)


def journal_files(folder: Path) -> dict[tuple[int, int], list[Path]]:
    """Return the journal files of each process, by restart and rank, in the order of their numbers.

    A process has one, without a number. Earlier versions continued in a new one after a failure; this version puts
    records that a full disk did not take into a second one.
    """
    try:
        entries = [(_JOURNAL.fullmatch(entry.name), Path(entry.path)) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return {}
    files: dict[tuple[int, int], list[Path]] = {}
    for restart, rank, _, path in sorted((int(m[1]), int(m[2]), int(m[3] or 0), path) for m, path in entries if m):
        files.setdefault((restart, rank), []).append(path)
    return files


def open_file(path: Path) -> BinaryIO | None:
    """Open a file for reading, or return None if it is missing or cannot be read; the latter is logged.

    A directory or a pipe in its place neither raises nor blocks: one damaged run must not hide the others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as e:
        logger.warning("ignoring %s: %s", path, e.strerror)
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        logger.warning("ignoring %s: not a regular file", path)
        return None
    return open(fd, "rb", buffering=2**20)


def count_starts(folder: Path, info: dict[str, Any]) -> int:
    """Return the number of starts of a run, by its run.json and by its journals."""
    begun = [start["restart"] for start in info.get("restarts", [])]
    return max([*begun, *(restart for restart, _ in journal_files(folder))], default=-1) + 1


def read_info(folder: Path, *, quietly: bool = False) -> dict[str, Any]:
    """Return run.json, or an empty dict if it is missing or invalid; the latter is logged.

    No list of runs and no other run's resume may fail because of its content: each field in the result has the type and
    range that readers rely on.

    Args:
        folder: the run's directory.
        quietly: whether to log nothing, as another reader does.
    """
    file = open_file(folder / INFO_FILE)
    if file is None:
        return {}
    try:
        with file:
            info = json.load(file)
        problem = _problem_of(info, _FIELDS)
    except (OSError, ValueError, RecursionError) as e:
        problem = str(e)
    if not problem:
        return info  # type: ignore[no-any-return]
    if not quietly:
        logger.warning("ignoring %s: %s", folder / INFO_FILE, problem)
    return {}


def _problem_of(record: Any, fields: Mapping[str, Callable[[Any], bool]]) -> str:
    """Return what is wrong with a record, or an empty text if each field that it has is valid."""
    if not isinstance(record, dict):
        return f"expected an object, found {_cut(record)}"
    return next(
        (f"unexpected {name}: {_cut(record[name])}" for name, check in fields.items()
         if name in record and not check(record[name])), "",
    )  # fmt: skip


def _cut(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= 60:
        return text
    return text[:59] + "…"


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_moment(value: Any) -> bool:
    return is_number(value) and 0 <= value < _YEAR_10000


def _is_command(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_start(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    number = value.get("restart")
    return type(number) is int and 0 <= number < _MAX_RESTARTS and not _problem_of(value, _START_FIELDS)


_YEAR_10000 = 253402300800
"""Seconds since the epoch that no calendar of Python's reaches."""
_MAX_RESTARTS = 10**9
"""Restarts have at most nine digits in a journal's name."""
_START_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "time": _is_moment,
    "host": _is_text,
    "argv": _is_command,
    "cwd": _is_text,
    "git": lambda value: value is None or isinstance(value, dict),
}
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "name": _is_name,
    "created": _is_moment,
    "argv": _is_command,  # earlier versions recorded command and directory once for the run
    "cwd": _is_text,
    "restarts": lambda value: isinstance(value, list) and all(map(_is_start, value)),
}


def _write_info(folder: Path, info: dict[str, Any]) -> None:
    write_atomic(folder / INFO_FILE, json.dumps(info, indent=1).encode() + b"\n")


def match_id(prefix: str, ids: Iterable[str]) -> list[str]:
    """Return the ID that equals ``prefix``, or else all that begin with it; none for an empty prefix."""
    matches = [found for found in ids if prefix and found.startswith(prefix)]
    return [prefix] if prefix in matches else matches


def ambiguous_id(prefix: str, matches: Sequence[str], kind: str) -> str:
    """Return the message for a prefix of several IDs.

    Args:
        prefix: the text that was given.
        matches: the IDs that begin with it.
        kind: the plural of what they name, such as ``runs``.
    """
    names = ", ".join(matches[:5])
    if len(matches) > 5:
        names += ", …"
    return f"{len(matches)} {kind} begin with {prefix!r}: {names}; give more of the ID"


def match_run_id(prefix: str, ids: Iterable[str], runs: Path) -> str:
    """Return the one run ID that ``prefix`` stands for.

    Args:
        prefix: a run ID or its beginning.
        ids: the IDs of all runs.
        runs: the directory that they lie in, for the message.

    Raises:
        RunNotFound: If no ID begins with the prefix, or several do.
    """
    matches = match_id(prefix, ids)
    if not matches:
        raise RunNotFound(f"no run {prefix!r} in {runs}; det-core runs list shows those there are")
    if len(matches) > 1:
        raise RunNotFound(ambiguous_id(prefix, matches, f"runs in {runs}"))
    return matches[0]


def _age(path: Path) -> tuple[str, float, str]:
    """Return a sort key: the second in the name, then the exact time in run.json."""
    return path.name[:15], float(read_info(path, quietly=True).get("created", 0.0)), path.name


def _holder(path: Path) -> str:
    """Return a description of the holder of a lock, by the content of its file."""
    try:
        holder = json.loads(path.read_bytes())
        return f"pid {int(holder['pid'])} on {holder['host']}"
    except (OSError, ValueError, LookupError, TypeError):  # it has just been locked, and is not written yet
        return "another process"


# A DataLoader worker may outlive its trainer, whose run would stay locked.
_locks = ForkGuard(WriterLock.release)
