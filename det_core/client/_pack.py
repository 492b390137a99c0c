"""The context: a directory's files, as they travel to a master (§10)."""

from __future__ import annotations

import io
import logging
import stat
import tarfile
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from det_core._walk import walk

MAX_BYTES = 95 << 20
"""Bytes of files that a context may hold."""
logger = logging.getLogger("det_core")


def pack(folder: Path | str, home: Path | None = None) -> str:
    """Return the files of a directory as a gzipped tar in base64, without those that its ``.detignore`` names.

    A file that cannot travel, such as a pipe, is left out with a warning.

    Args:
        folder: The directory. ``.detignore`` in it has patterns as ``.gitignore`` has.
        home: The directory that runs are kept in, which is not part of a context.

    Raises:
        ValueError: If it is not a directory, or holds more than a context may; the message names what is largest.
        OSError: If a file cannot be read.
        MissingExtra: If there is a ``.detignore``, and what reads it is not installed.
    """
    root = Path(folder)
    if not root.is_dir():
        if root.exists():
            raise ValueError(f"the context {root} is not a directory")
        raise ValueError(f"directory not found: {root}")
    entries = list(walk(root, home, skipped=_warn))
    _check_size(root, {path: entry.stat().st_size for path, entry in entries if entry.is_file()})
    packed = io.BytesIO()
    # PAX, as the older formats end at paths of 256 bytes and files of 8 GiB.
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT, compresslevel=4) as tar:
        for path, entry in entries:
            status = entry.stat()
            member = tarfile.TarInfo(path)
            member.mode = stat.S_IMODE(status.st_mode)
            member.mtime = int(status.st_mtime)
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
                continue
            content = Path(entry.path).read_bytes()
            # Not the size of before: a file that grows meanwhile would shift all that follows in the archive.
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return b64encode(packed.getvalue()).decode()


def _warn(path: str, reason: str) -> None:
    logger.warning("leaving %r out of the context: %s", path, reason)


def _check_size(root: Path, sizes: Mapping[str, int]) -> None:
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    tops: Counter[str] = Counter()
    for path, size in sizes.items():
        tops[path.partition("/")[0]] += size
    parts = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in tops.most_common(3))
    raise ValueError(
        f"the context {root} holds {total / 1e6:.0f} MB, and may hold {MAX_BYTES / 1e6:.0f} MB; the most is in "
        f"{parts}: name what the trials do not need in {root / '.detignore'}, one pattern a line, as in .gitignore"
    )
