"""The folder of a run: ``<home>/runs/<run_id>/``, with run.json, the writer's lock, journals, checkpoints.

``run.json`` says what was started, when and how often. ``run.lock`` is held by the process that writes the run: a lock
goes away with its holder, however that dies, so that nobody needs to clean up.
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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from det_core import _clock
from det_core._json import is_number
from det_core._standalone.files import write_atomic
from det_core.errors import RunError, RunLocked, RunNotFound

logger = logging.getLogger("det_core")

INFO_FILE = "run.json"
LOCK_FILE = "run.lock"
LOCK_TIMEOUT = 1.0
"""Seconds to wait for the lock: a child that a killed holder was just forking may not have let go yet."""
_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_JOURNAL = re.compile(r"journal-(\d{1,9})-(\d{1,9})(?:\.(\d{1,9}))?\.jsonl")
_FLOCK = "hhqqi4x"
_WRITE_LOCK = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""The lock: all of the file, for writing."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass
class RunFolder:
    """One run on disk.

    Attributes:
        path: the folder.
        run_id: its name: the UTC time of creation and six random characters, so that names sort by age.
        name: what ``latest`` goes by.
        restart: the restart this process writes; -1 before :meth:`begin_restart`.
    """

    path: Path
    run_id: str
    name: str
    restart: int = -1
    _lock: WriterLock | None = field(default=None, repr=False, compare=False)

    @classmethod
    def create(cls, home: Path, *, name: str) -> RunFolder:
        """Make the folder of a new run.

        Args:
            home: the home folder; made if need be.
            name: the run's name.

        Raises:
            RunError: the folder cannot be made; the message gives path and reason.
        """
        from secrets import choice

        created = _clock.now()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(created))
        runs = Path(home) / "runs"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            while True:  # of a thousand runs begun in one second, two may draw the same
                run_id = f"{stamp}-{''.join(choice(_ALPHABET) for _ in range(6))}"
                with suppress(FileExistsError):
                    (runs / run_id).mkdir()
                    break
            _write_info(runs / run_id, {"run_id": run_id, "name": name, "created": created, "restarts": []})
        except OSError as e:
            raise RunError(
                f"a run cannot be kept in {runs}: {e.strerror}. Set DET_CORE_HOME to a folder of yours"
            ) from None
        return cls(runs / run_id, run_id, name)

    @classmethod
    def open(cls, home: Path, run_id: str) -> RunFolder:
        """The folder of a run that exists.

        Args:
            home: the home folder.
            run_id: the run's id, or the beginning of it that no other has.

        Raises:
            RunNotFound: no run of that id, or several begin with it.
        """
        path = Path(home) / "runs" / run_id
        if not _ID.fullmatch(run_id) or not path.is_dir():
            paths = {path.name: path for path in run_paths(home)}
            path = paths[match_run_id(run_id, paths, Path(home, "runs"))]
        return cls(path, path.name, read_info(path, quietly=True).get("name", ""))

    @classmethod
    def latest(cls, home: Path, name: str) -> RunFolder | None:
        """The newest run called ``name``, or None."""
        found = (path for path in run_paths(home) if read_info(path).get("name") == name)
        path = next(found, None)
        return None if path is None else cls(path, path.name, name)

    def begin_restart(self, start: Mapping[str, Any] | None = None) -> int:
        """Take the run for writing and count one restart more, durably.

        Args:
            start: what run.json is to say of it beside the time, host and pid, such as its ``argv``.

        Returns:
            The number of this restart; a new run begins with 0.

        Raises:
            RunLocked: another process writes the run; the message names host and pid.
            RunError: the folder cannot be written.
        """
        try:
            lock = WriterLock(self.path / LOCK_FILE, self.run_id)
            try:
                self.restart = self._count_restart(start or {})
            except BaseException:
                lock.release()
                raise
        except OSError as e:
            raise RunError(f"run {self.run_id} in {self.path} cannot be written: {e.strerror}") from e
        self._lock = lock
        for reserve in self.path.glob("journal-*.reserve"):  # of processes that were killed
            with suppress(OSError):
                reserve.unlink()
        return self.restart

    def release(self) -> None:
        """Let another process write the run. Twice is fine."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _count_restart(self, start: Mapping[str, Any]) -> int:
        now = _clock.now()
        fresh = {"run_id": self.run_id, "name": self.name, "created": now, "restarts": []}
        info = {
            **fresh,
            **read_info(self.path, quietly=True),
        }  # which is empty where run.json is gone, or was never there
        restart = count_starts(self.path, info)
        if not restart:
            info["name"] = self.name
        begun = {"restart": restart, "time": now, "host": os.uname().nodename, "pid": os.getpid()}
        info["restarts"].append({**begun, **start})
        _write_info(self.path, info)
        return restart


class WriterLock:
    """The right to write a run. A forked child does not inherit it.

    It is an open-file-description lock: unlike ``flock`` it can be asked about without being taken, so that listing
    runs never makes a writer fail, and unlike a POSIX record lock it is not lost when some other part of the process
    reads the file. It works on NFS and on Lustre.

    Args:
        path: the lock's file; it says who holds it.
        run_id: for messages.

    Raises:
        RunLocked: another process has it; the message names host and pid.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            if not self._acquire(path):
                who = _holder(path)
                by = f"pid {who[1]} on {who[0]}" if who else "another process"
                raise RunLocked(
                    f"run {run_id} is being written by {by}; wait for it to end, stop it, or start a new run "
                    "(without resume)"
                )
            holder = {"host": os.uname().nodename, "pid": os.getpid(), "time": _clock.now()}
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(holder).encode(), 0)
        except BaseException:
            self.release()
            raise
        _LOCKS.add(self)

    def release(self) -> None:
        """Give it back. Twice is fine."""
        fd, self._fd = self._fd, -1
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
                    logger.warning(
                        "%s cannot be locked (%s): a second process could write this run too", path, e.strerror
                    )
                    return True
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if _clock.monotonic() > deadline:
                return False
            time.sleep(0.01)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keep every other process from writing the run.

    Raises:
        RunLocked: a process is writing it.
    """
    lock = WriterLock(folder / LOCK_FILE, folder.name)
    try:
        yield
    finally:
        lock.release()


def is_live(folder: Path) -> bool:
    """Whether a process is writing the run; takes nothing."""
    found = open_file(folder / LOCK_FILE)
    if found is None:
        return False
    with found:
        try:
            answer = fcntl.fcntl(found, fcntl.F_OFD_GETLK, _WRITE_LOCK)
        except OSError:
            return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def run_paths(home: Path) -> list[Path]:
    """The folders of all runs, newest first. Raises RunError where they cannot be looked at."""
    runs = Path(home) / "runs"
    try:
        names = [entry.name for entry in os.scandir(runs) if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise RunError(f"no runs can be read in {runs}: {e.strerror}. Set DET_CORE_HOME to a folder of yours") from None
    return sorted((runs / name for name in names if _ID.fullmatch(name)), key=_age, reverse=True)


def journal_files(folder: Path) -> dict[tuple[int, int], list[Path]]:
    """The journal files of each process, by restart and rank, in the order of their numbers.

    A process has one, without a number. Earlier versions went on in a new one after trouble; this one puts into a
    second what a disk that stayed full did not take.
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
    """Open a file for reading; None where there is none, or none that can be read, which is logged.

    A folder or a pipe in a file's place neither raises nor hangs: one damaged run must not hide the others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as e:
        logger.warning("%s cannot be read, and is passed over: %s", path, e.strerror)
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        logger.warning("%s is no file, and is passed over", path)
        return None
    return open(fd, "rb", buffering=2**20)


def count_starts(folder: Path, info: dict[str, Any]) -> int:
    """Return how often a run was started, by its run.json and by its journals."""
    begun = [start["restart"] for start in info.get("restarts", [])]
    return max([*begun, *(restart for restart, _ in journal_files(folder))], default=-1) + 1


def read_info(folder: Path, *, quietly: bool = False) -> dict[str, Any]:
    """Read run.json; empty where there is none, or none that can be used, which is logged.

    Whatever stands in it, no list of runs may fail because of it, and no other run's resume: every field that is there
    has the type and range that readers rely on.

    Args:
        folder: the run's folder.
        quietly: log nothing, where another reader does.
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
    """Return what is wrong with a record, in words; empty if each field that it has is as expected."""
    if not isinstance(record, dict):
        return f"expected an object, found {_cut(record)}"
    return next(
        (f"unexpected {name}: {_cut(record[name])}" for name, check in fields.items()
         if name in record and not check(record[name])), "",
    )  # fmt: skip


def _cut(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_moment(value: Any) -> bool:
    return is_number(value) and 0 <= value < _YEAR_10000


def _is_command(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_start(value: Any) -> bool:
    number = value.get("restart") if isinstance(value, dict) else None
    return type(number) is int and 0 <= number < _MAX_RESTARTS and not _problem_of(value, _START_FIELDS)


_YEAR_10000 = 253402300800
"""Seconds since the epoch, beyond which no calendar of Python's goes."""
_MAX_RESTARTS = 10**9
"""What has a place in a journal's name."""
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
    "argv": _is_command,  # earlier versions said it once, of the run, and so the directory
    "cwd": _is_text,
    "restarts": lambda value: isinstance(value, list) and all(map(_is_start, value)),
}


def _write_info(folder: Path, info: dict[str, Any]) -> None:
    write_atomic(folder / INFO_FILE, json.dumps(info, indent=1).encode() + b"\n")


def match_id(prefix: str, ids: Iterable[str]) -> list[str]:
    """Return the ID that is ``prefix`` itself, or else all that begin with it; none if it is empty."""
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
    """Sorts by the second in the name, and within it by the moment in run.json."""
    return path.name[:15], float(read_info(path, quietly=True).get("created", 0.0)), path.name


def _holder(path: Path) -> tuple[str, int] | None:
    """Host and pid of who holds a lock, as far as its file says."""
    try:
        who = json.loads(path.read_bytes())
        return str(who["host"]), int(who["pid"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _after_fork() -> None:
    """Let go of the locks in a child: a DataLoader worker outlives its trainer, whose run would stay locked."""
    for lock in list(_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_after_fork)
