"""The folder of a run: ``<home>/runs/<run_id>/``, with its lock, journals, checkpoints, TensorBoard files."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.errors import RunError, RunNotFound
from det_core.journal._lock import WriterLock, held

INFO = "run.json"
LOCK = "run.lock"
_KINDS: dict[str, type | tuple[type, ...]] = {
    "run_id": str,
    "name": str,
    "created": (int, float),
    "argv": list,
    "cwd": str,
    "restarts": list,
}
_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_JOURNAL = re.compile(r"journal-(\d{1,9})-(\d{1,9})(?:\.(\d{1,9}))?\.jsonl")


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
    def create(cls, home: Path, *, name: str, argv: Sequence[str] | None = None) -> RunFolder:
        """Make the folder of a new run.

        Args:
            home: the home folder; made if need be.
            name: the run's name.
            argv: the command, for people.

        Raises:
            RunError: the folder cannot be made; the message gives path and reason.
        """
        from secrets import choice

        created = _clock.now()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(created))
        runs = Path(home) / "runs"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            while True:
                run_id = f"{stamp}-{''.join(choice(_ALPHABET) for _ in range(6))}"
                try:
                    (runs / run_id).mkdir()
                    break
                except FileExistsError:
                    continue
            info = {
                "run_id": run_id,
                "name": name,
                "created": created,
                "argv": list(sys.argv if argv is None else argv),
                "cwd": os.getcwd(),
                "restarts": [],
            }
            write_info(runs / run_id, info)
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
            found = [p for p in run_paths(home) if run_id and p.name.startswith(run_id)]
            if len(found) != 1:
                raise RunNotFound(_not_one(run_id, found, path.parent))
            path = found[0]
        return cls(path, path.name, str(read_info(path).get("name", "")))

    @classmethod
    def latest(cls, home: Path, name: str) -> RunFolder | None:
        """The newest run called ``name``, or None."""
        for path in run_paths(home):
            info = read_info(path)
            if info.get("name") == name:
                return cls(path, path.name, name)
        return None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go when no storage is configured."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Where TensorBoard files go."""
        return self.path / "tensorboard"

    def journal_path(self, rank: int) -> Path:
        """The first journal file of a rank in this restart."""
        return self.path / f"journal-{self.restart}-{rank}.jsonl"

    def begin_restart(self) -> int:
        """Take the run for writing and count one restart more, durably.

        Returns:
            The number of this restart; a new run begins with 0.

        Raises:
            RunLocked: another process writes the run; the message names host and pid.
            RunError: the folder cannot be written.
        """
        try:
            lock = WriterLock(self.path / LOCK, self.run_id)
            try:
                self.restart = self._count_restart()
            except BaseException:
                lock.release()
                raise
        except OSError as e:
            raise RunError(f"run {self.run_id} in {self.path} cannot be written: {e.strerror}") from e
        self._lock = lock
        return self.restart

    def release(self) -> None:
        """Let another process write the run. Twice is fine."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _count_restart(self) -> int:
        info = read_info(self.path)
        info.setdefault("run_id", self.run_id)
        info.setdefault("name", self.name)
        info.setdefault("created", _clock.now())
        restarts = info.setdefault("restarts", [])
        restart = count_restarts(self.path, info)
        begun = {"restart": restart, "time": _clock.now(), "host": os.uname().nodename, "pid": os.getpid()}
        restarts.append(begun)
        write_info(self.path, info)
        return restart


def _not_one(run_id: str, found: Sequence[Path], runs: Path) -> str:
    """Why ``run_id`` names no run."""
    if not found:
        return f"no run {run_id!r} in {runs}; det-core runs list shows those there are"
    some = ", ".join(path.name for path in found[:5]) + (", …" if len(found) > 5 else "")
    return f"{len(found)} runs in {runs} begin with {run_id!r}: {some}; give more of the id"


def run_paths(home: Path) -> list[Path]:
    """The folders of all runs, newest first."""
    runs = Path(home) / "runs"
    try:
        names = [entry.name for entry in os.scandir(runs) if entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted((runs / name for name in names if _ID.fullmatch(name)), key=_age, reverse=True)


def _age(path: Path) -> tuple[str, float, str]:
    """Sorts by the second in the name, and within it by the moment in run.json."""
    stamp = path.name[:15]
    return stamp, float(read_info(path).get("created", 0.0)), path.name


def journal_files(folder: Path) -> Iterator[tuple[int, int, int, Path]]:
    """Restart, rank, number and path of every journal file, in this order."""
    found = []
    try:
        for entry in os.scandir(folder):
            if match := _JOURNAL.fullmatch(entry.name):
                found.append((int(match[1]), int(match[2]), int(match[3] or 0), Path(entry.path)))
    except FileNotFoundError:
        return
    yield from sorted(found)


def count_restarts(folder: Path, info: dict[str, Any]) -> int:
    """How often a run was started, by its run.json and by its journals."""
    begun = [r.get("restart") for r in info.get("restarts", []) if isinstance(r, dict)]
    numbers = [number for number in begun if isinstance(number, int)]
    return max([*numbers, *(restart for restart, _, _, _ in journal_files(folder))], default=-1) + 1


def read_info(folder: Path) -> dict[str, Any]:
    """What run.json says; empty where it is gone or broken."""
    try:
        info = json.loads((folder / INFO).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(info, dict):
        return {}
    return {key: info[key] for key, kind in _KINDS.items() if isinstance(info.get(key), kind)}


def write_info(folder: Path, info: dict[str, Any]) -> None:
    """Replace run.json: whole or not at all, and durable on return."""
    aside = folder / f"{INFO}.{os.getpid()}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        data = json.dumps(info, indent=1).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(aside, folder / INFO)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(at)
    finally:
        os.close(at)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep every other process from writing the run.

    Raises:
        RunLocked: a process is writing it.
    """
    lock = WriterLock(folder / LOCK, folder.name)
    try:
        yield
    finally:
        lock.release()


def is_live(folder: Path) -> bool:
    """Whether a process is writing the run."""
    return held(folder / LOCK)
