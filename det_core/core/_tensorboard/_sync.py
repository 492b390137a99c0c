"""Copies of TensorBoard's files beside the checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from det_core.errors import CheckpointError, TensorboardError

Put = Callable[[Path, str], None]
"""Copies one local file to a relative POSIX path, in place of what is there, in one step."""
_PART = ".part"
"""The end of the name of a copy under way; TensorBoard does not read such a file."""


@dataclass
class Copies:
    """Where event files are copied to.

    Args:
        put: copies one file.
        where: how messages name the place.
    """

    put: Put
    where: str
    _copied: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def upload(
        self,
        source: Path,
        rank: int,
        selector: Callable[[Path], bool] = lambda _: True,
        mangler: Callable[[Path, int], Path] = lambda path, _: path,
    ) -> list[str]:
        """Copy the selected files below ``source``.

        Args:
            source: a folder; one that is not there holds no files.
            rank: handed to ``mangler``.
            selector: is given each file's path relative to ``source``; True for a file to copy.
            mangler: is given that path and the rank; returns the relative path to copy to.

        Returns:
            The names copied to, in the order of the names in ``source``.

        Raises:
            ValueError: ``mangler`` returns an absolute path, one that leads upwards, or the same path for two files.
                Nothing has been copied then.
            TensorboardError: a file cannot be read or written; the message names it.
        """
        plan: dict[str, Path] = {}
        for path in _files(source):
            if not selector(path):
                continue
            target = _inside(mangler(path, rank), path)
            if target in plan:
                raise ValueError(f"mangler gives {target!r} for both {str(plan[target])!r} and {str(path)!r}")
            plan[target] = path
        for target, path in plan.items():
            self._copy(source / path, target)
        return list(plan)

    def sync(self, source: Path, below: str = "") -> list[str]:
        """Copy the files below ``source`` whose size or time of change is another one than when they were copied last.

        Args:
            source: a folder; one that is not there holds no files.
            below: begins each name there; a folder's ends in a slash.

        Returns:
            The names copied to.

        Raises:
            TensorboardError: a file cannot be read or written; the message names it.
        """
        copied = []
        for path in _files(source):
            state = _state(source / path)
            if self._copied.get(path) != state:
                self._copy(source / path, below + path.as_posix())
                self._copied[path] = state  # from before: a file that has grown meanwhile is copied again
                copied.append(below + path.as_posix())
        return copied

    def _copy(self, path: Path, name: str) -> None:
        try:
            self.put(path, name)
        except (CheckpointError, OSError) as e:
            reason = e.strerror or e if isinstance(e, OSError) else e
            raise TensorboardError(f"copying {path} to {self.where}/{name}: {reason}") from e


def copies_in(folder: Path) -> Copies:
    """Copies in a folder of this machine."""

    def put(path: Path, name: str) -> None:
        import shutil

        target = folder / name
        aside = target.with_name(f".{target.name}.{os.getpid()}{_PART}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(path, aside)
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    return Copies(put, str(folder))


def _files(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if not name.endswith(_PART) and path.is_file():
                yield path.relative_to(source)


def _inside(mangled: Path | str, path: Path) -> str:
    target = PurePosixPath(os.path.normpath(mangled))
    if target.is_absolute() or target.parts[:1] in ((), ("..",)):
        raise ValueError(f"mangler gives {str(mangled)!r} for {str(path)!r}: expected a path inside the destination")
    return str(target)


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as e:
        raise TensorboardError(f"looking at {path}: {e.strerror or e}") from e
    return found.st_size, found.st_mtime_ns
