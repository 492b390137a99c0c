"""Code in a directory: all files except those of its ``.detignore``, or those that this process has loaded.

Patterns of a ``.detignore`` are those of a ``.gitignore``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

NEVER = frozenset([".git", "__pycache__", ".detignore"])
"""Names that are left out anywhere, as are virtual environments and the home of runs."""

Ignored = Callable[[str], bool]


def ignored_in(root: Path) -> Ignored:
    """Return a function of paths below ``root`` (those of directories end in a slash) that ``.detignore`` leaves out.

    Raises:
        MissingExtra: If there is a ``.detignore``, and its reader is not installed.
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
    root: Path,
    home: Path | None,
    *,
    hidden: bool = True,
    failed: Callable[[OSError], None] | None = None,
    skipped: Callable[[str, str], None] = lambda path, reason: None,
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every file and directory with its path below the root; links are followed.

    Args:
        root: The directory.
        home: Home of runs, which is left out.
        hidden: Whether to yield names that begin with a dot.
        failed: Called with the error of a directory that cannot be read, which is then left out. None: raise it.
        skipped: Called with the path of what is left out because it is not a file or a directory, and the reason.
    """
    ignored = ignored_in(root)
    real_root = os.path.realpath(root)

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
            if os.path.isfile(entry.path):  # not entry.is_file(), which raises for a link to itself
                yield path, entry
            elif os.path.isdir(entry.path):
                # By real paths: a link to a directory above would be followed for ever.
                real = os.path.realpath(entry.path)
                if ignored(path + "/") or _kept_out(entry.path, real, home):
                    continue
                if real in above or real_root.startswith(real.rstrip("/") + "/"):
                    skipped(path, "link to a directory that contains it")
                    continue
                yield path, entry
                yield from below(entry.path, path + "/", above | {real})
            elif entry.is_symlink():
                skipped(path, "link to nothing")
            else:
                skipped(path, "not a regular file")

    yield from below(str(root), "", frozenset([real_root]))


def _kept_out(path: str, real: str, home: Path | None) -> bool:
    return os.path.exists(os.path.join(path, "pyvenv.cfg")) or (home is not None and real == os.path.realpath(home))


def loaded(root: Path, more: Iterable[str]) -> list[str]:
    """Return the paths below ``root`` of the files of loaded modules, without installed ones.

    Args:
        root: The directory.
        more: Patterns of further files, and of directories, which stand for all their files.
    """
    below = f"{root}{os.sep}"
    ours = os.path.dirname(os.path.abspath(__file__))
    installed = tuple(f"{each}{os.sep}" for each in (ours, sys.prefix) if each.startswith(below))
    # Of the dictionaries: a lazy module would import something at an attribute.
    known = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    paths = {os.path.abspath(path) for path in known if isinstance(path, str)}
    names = {path.removeprefix(below) for path in paths if path.startswith(below) and not path.startswith(installed)}
    names = {name for name in names if not {"site-packages", "dist-packages"} & set(name.split(os.sep))}
    for path in (path for pattern in more for path in root.glob(pattern)):
        names |= {str(each.relative_to(root)) for each in (path.rglob("*") if path.is_dir() else [path])}
    ignored = ignored_in(root)
    return sorted(name for name in names if not ignored(name) and os.path.isfile(below + name))
