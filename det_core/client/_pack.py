"""The context: a folder's files, as they travel to a master (§10)."""

from __future__ import annotations

import os
import stat
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT = 95 << 20
"""Bytes that a context may hold."""
NEVER = frozenset([".git", "__pycache__", ".detignore"])
"""Names that are never part of a context; nor is a virtual environment, nor what det_core keeps."""
_FILE, _FOLDER = ord("0"), ord("5")

Ignored = Callable[[str], bool]


def pack(folder: Path | str, home: Path | None = None) -> list[dict[str, Any]]:
    """The files of a folder but for those that its ``.detignore`` names, as the master takes them.

    Args:
        folder: the folder. ``.detignore`` in it has patterns as ``.gitignore`` has.
        home: the folder that runs are kept in: no part of a context.

    Raises:
        ValueError: there is no such folder, or it holds more than a context may; the message names what is largest.
        OSError: a file cannot be read.
        MissingExtra: there is a ``.detignore``, and what reads it is not installed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"the context {root} is no folder" if root.exists() else f"there is no folder {root}")
    entries: list[dict[str, Any]] = []
    total = 0
    for path, entry in _walk(root, "", _ignored(root), home, frozenset([os.path.realpath(root)])):
        status = entry.stat()
        is_folder = stat.S_ISDIR(status.st_mode)
        total += 0 if is_folder else status.st_size
        if total > LIMIT:
            raise ValueError(_too_large(root, home))
        content = b"" if is_folder else Path(entry.path).read_bytes()
        entries.append(
            {
                "path": path,
                "type": _FOLDER if is_folder else _FILE,
                "content": b64encode(content).decode(),
                "mtime": str(int(status.st_mtime)),
                "mode": stat.S_IMODE(status.st_mode),
                "uid": 0,
                "gid": 0,
            }
        )
    return entries


def _walk(
    folder: Path | str, prefix: str, ignored: Ignored, home: Path | None, above: frozenset[str]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file and folder with its path below the root; links are what they lead to."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = prefix + entry.name
        if entry.name in NEVER or ignored(path):
            continue
        if entry.is_file():
            yield path, entry
        elif entry.is_dir():
            real = os.path.realpath(entry.path)
            if real in above or ignored(path + "/") or _kept_out(entry.path, real, home):
                continue
            yield path, entry
            yield from _walk(entry.path, path + "/", ignored, home, above | {real})


def _kept_out(path: str, real: str, home: Path | None) -> bool:
    return os.path.exists(os.path.join(path, "pyvenv.cfg")) or (home is not None and real == os.path.realpath(home))


def _ignored(root: Path) -> Ignored:
    """Whether ``.detignore`` names a path; that of a folder ends in a slash."""
    try:
        lines = (root / ".detignore").read_text().splitlines()
    except FileNotFoundError:
        return lambda _path: False
    from det_core._optional import require

    pathspec = require("pathspec", extra="master", purpose=f"reading {root / '.detignore'}")
    matches: Ignored = pathspec.GitIgnoreSpec.from_lines(lines).match_file
    return matches


def _too_large(root: Path, home: Path | None) -> str:
    sizes: dict[str, int] = {}
    for path, entry in _walk(root, "", _ignored(root), home, frozenset([os.path.realpath(root)])):
        if entry.is_file():
            top = path.partition("/")[0]
            sizes[top] = sizes.get(top, 0) + entry.stat().st_size
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    told = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
    return (
        f"the context {root} holds {sum(sizes.values()) / 1e6:.0f} MB, and may hold {LIMIT / 1e6:.0f} MB; the most is "
        f"in {told}: name what the trials do not need in {root / '.detignore'}, one pattern a line, as in .gitignore"
    )
