"""The code in a folder: all files but for those that its ``.detignore`` names, whose patterns are those of a
``.gitignore``; or those that this process has loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

NEVER = frozenset([".git", "__pycache__", ".detignore"])
"""Names that are left out anywhere; so are virtual environments, and the folder that runs are kept in."""

Ignored = Callable[[str], bool]


def ignored_in(root: Path) -> Ignored:
    """Whether ``.detignore`` names a path below ``root``; that of a folder ends in a slash.

    Raises:
        MissingExtra: there is a ``.detignore``, and what reads it is not installed.
    """
    try:
        lines = (root / ".detignore").read_text().splitlines()
    except FileNotFoundError:
        return lambda _path: False
    from det_core._optional import require

    pathspec = require("pathspec", extra="master", purpose=f"reading {root / '.detignore'}")
    matches: Ignored = pathspec.GitIgnoreSpec.from_lines(lines).match_file
    return matches


def walk(
    root: Path, home: Path | None, *, hidden: bool = True, failed: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file and folder with its path below the root; links are what they lead to.

    Args:
        root: the folder.
        home: the folder that runs are kept in.
        hidden: whether names that begin with a dot are there.
        failed: told of a folder that cannot be looked into, which is left out then; None: that is an error.
    """
    ignored = ignored_in(root)

    def below(folder: str, prefix: str, above: frozenset[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as e:
            if failed is None:
                raise
            failed(e)
            return
        for entry in entries:
            path = prefix + entry.name
            if entry.name in NEVER or (entry.name.startswith(".") and not hidden) or ignored(path):
                continue
            if entry.is_file():
                yield path, entry
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in above or ignored(path + "/") or _kept_out(entry.path, real, home):
                    continue
                yield path, entry
                yield from below(entry.path, path + "/", above | {real})

    yield from below(str(root), "", frozenset([os.path.realpath(root)]))


def _kept_out(path: str, real: str, home: Path | None) -> bool:
    return os.path.exists(os.path.join(path, "pyvenv.cfg")) or (home is not None and real == os.path.realpath(home))


def loaded(root: Path, more: Iterable[str]) -> list[str]:
    """The files of the modules that this process has loaded from below ``root``, but for installed ones; paths there.

    Args:
        root: the folder.
        more: patterns of further files, and of folders, all of whose files are meant.
    """
    below = f"{root}{os.sep}"
    ours = os.path.dirname(os.path.abspath(__file__))
    installed = tuple(f"{each}{os.sep}" for each in (ours, sys.prefix) if each.startswith(below))
    known = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    paths = {os.path.abspath(path) for path in known if isinstance(path, str)}
    names = {path.removeprefix(below) for path in paths if path.startswith(below) and not path.startswith(installed)}
    names = {name for name in names if not {"site-packages", "dist-packages"} & set(name.split(os.sep))}
    for path in (path for pattern in more for path in root.glob(pattern)):
        names |= {str(each.relative_to(root)) for each in (path.rglob("*") if path.is_dir() else [path])}
    ignored = ignored_in(root)
    return sorted(name for name in names if not ignored(name) and os.path.isfile(below + name))
