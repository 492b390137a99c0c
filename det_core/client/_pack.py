"""The context: a folder's files, as they travel to a master (§10)."""

from __future__ import annotations

import stat
from base64 import b64encode
from pathlib import Path
from typing import Any

from det_core._walk import walk

LIMIT = 95 << 20
"""Bytes that a context may hold."""
_FILE, _FOLDER = ord("0"), ord("5")


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
    for path, entry in walk(root, home):
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


def _too_large(root: Path, home: Path | None) -> str:
    sizes: dict[str, int] = {}
    for path, entry in walk(root, home):
        if entry.is_file():
            top = path.partition("/")[0]
            sizes[top] = sizes.get(top, 0) + entry.stat().st_size
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    told = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
    return (
        f"the context {root} holds {sum(sizes.values()) / 1e6:.0f} MB, and may hold {LIMIT / 1e6:.0f} MB; the most is "
        f"in {told}: name what the trials do not need in {root / '.detignore'}, one pattern a line, as in .gitignore"
    )
