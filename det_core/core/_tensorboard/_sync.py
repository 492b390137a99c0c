"""Copies of TensorBoard's files beside the checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from det_core._errors import TensorboardError

_PART = ".part"
"""The end of the name of a copy under way; TensorBoard does not read such a file."""


def upload_files(
    source: Path,
    destination: Path,
    rank: int,
    selector: Callable[[Path], bool] = lambda _: True,
    mangler: Callable[[Path, int], Path] = lambda path, _: path,
) -> list[Path]:
    """Copy the selected files below ``source`` to ``destination``, each aside and then renamed.

    Args:
        source: a folder; one that is not there holds no files.
        destination: the folder to copy to; made if there is something to copy.
        rank: handed to ``mangler``.
        selector: is given each file's path relative to ``source``; True for a file to copy.
        mangler: is given that path and the rank; returns the path, relative to ``destination``, to copy to.

    Returns:
        The paths copied to, in the order of the names in ``source``.

    Raises:
        ValueError: ``mangler`` returns an absolute path, one that leaves the destination, or the same path
            for two files. Nothing has been copied then.
        TensorboardError: a file cannot be read or written; the message names it.
    """
    plan: dict[Path, Path] = {}
    for path in _files(source):
        if not selector(path):
            continue
        target = _inside(mangler(path, rank), path)
        if target in plan:
            raise ValueError(f"mangler gives {str(target)!r} for both {str(plan[target])!r} and {str(path)!r}")
        plan[target] = path
    for target, path in plan.items():
        _copy(source / path, destination / target)
    return [destination / target for target in plan]


def sync(source: Path, destination: Path) -> list[Path]:
    """Copy the files below ``source`` that differ in size or time of change from their copy in
    ``destination``.

    Returns:
        The paths copied to.

    Raises:
        TensorboardError: a file cannot be read or written; the message names it.
    """
    return upload_files(source, destination, 0, selector=lambda path: _changed(source / path, destination / path))


def _files(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if not name.endswith(_PART) and path.is_file():
                yield path.relative_to(source)


def _inside(mangled: Path | str, path: Path) -> Path:
    target = PurePosixPath(os.path.normpath(mangled))
    if target.is_absolute() or target.parts[:1] in ((), ("..",)):
        raise ValueError(f"mangler gives {str(mangled)!r} for {str(path)!r}: expected a path inside the destination")
    return Path(target)


def _changed(path: Path, copy: Path) -> bool:
    try:
        old = copy.stat()
    except OSError:
        return True
    new = path.stat()
    return (new.st_size, new.st_mtime_ns) != (old.st_size, old.st_mtime_ns)


def _copy(path: Path, target: Path) -> None:
    """Copy with the time of change from before the copy: a file that grows meanwhile is copied again next
    time."""
    import shutil

    aside = target.with_name(f".{target.name}.{os.getpid()}{_PART}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stat = path.stat()
        try:
            shutil.copyfile(path, aside)
            os.utime(aside, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise TensorboardError(f"copying {path} to {target}: {e.strerror or e}") from e
