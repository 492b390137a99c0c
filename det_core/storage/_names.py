"""Names: the layout of a store, and the rules for storage IDs, paths and globs that come from outside."""

from __future__ import annotations

import re
from collections.abc import Iterable

META_DIR = ".det_core"
"""Directory of a checkpoint for its manifest; files of the user cannot have this name."""
MANIFEST_PATH = ".det_core/manifest.json"
METADATA_FILE = "metadata.json"
"""File of a checkpoint for the user's metadata."""
STAGING_DIR = ".det_core-tmp"
"""Directory in a store's root for checkpoints that are being written or removed, and for leases."""
EVENT_FILES = "tensorboard"
"""Directory in a store's root for TensorBoard's event files."""
RESERVED = (EVENT_FILES,)
"""Names in a store's root that are not checkpoints."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""The characters of Unicode's category Cc."""


def check_storage_id(storage_id: object) -> str:
    """Return ``storage_id`` if it can name a directory directly below a store's root.

    Raises:
        ValueError: If it is not a string, is empty, begins with a dot, or has a separator or a control character.
    """
    if not isinstance(storage_id, str):
        raise ValueError(f"storage_id must be a string, not {type(storage_id).__name__} ({storage_id!r})")
    if not storage_id:
        raise ValueError("storage_id is empty: pass the ID that upload() or store_path() returned")
    if storage_id.startswith("."):
        raise ValueError(f"storage_id {storage_id!r} begins with a dot: it must be the bare name of a checkpoint")
    if "/" in storage_id or "\\" in storage_id:
        raise ValueError(f"storage_id {storage_id!r} holds a path separator: it must be the bare name of a checkpoint")
    if storage_id in RESERVED:
        raise ValueError(f"storage_id {storage_id!r} is reserved for a directory beside the checkpoints")
    # A name has at most 255 bytes on most file systems, and a lease adds an owner to it.
    if _CONTROL.search(storage_id) or len(storage_id.encode("utf-8", "replace")) > 200:
        raise ValueError(f"storage_id {storage_id!r} holds a control character or is longer than 200 bytes")
    return storage_id


def event_files_of_run(run_id: str) -> str:
    """Return the path below a store's root for the event files of a run without a master."""
    return f"{EVENT_FILES}/{run_id}"


def event_files_of_experiment(cluster_id: str, experiment_id: int) -> str:
    """Return the path below a store's root for the event files of an experiment (wire contract, §8)."""
    return f"{cluster_id}/{EVENT_FILES}/experiment/{experiment_id}"


def is_relative_path(path: object) -> bool:
    """Return whether ``path`` is relative, POSIX, in normal form, and stays inside the directory it is relative to."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def parent_folders(names: Iterable[str]) -> set[str]:
    """Return the directories that hold relative paths, at all levels; each ends in a slash."""
    inner = {name.rpartition("/")[0] for name in names}
    inner.discard("")
    return {f"{folder}/" for folder in inner}.union(*map(parents, inner))


def parents(path: str) -> list[str]:
    """Return the directories above a relative path, outermost first: ``a/b/c`` has ``a/`` and ``a/b/``."""
    parts = path.rstrip("/").split("/")[:-1]
    return ["/".join(parts[: i + 1]) + "/" for i in range(len(parts))]


def glob_pattern(glob: str) -> re.Pattern[str]:
    """Return a regular expression for a glob over relative paths.

    ``**`` matches any directories, ``*`` and ``?`` match within one name.
    """
    out = []
    i = 0
    # Not fnmatch's, in which * matches slashes, too.
    while i < len(glob):
        if glob.startswith("**/", i):
            out.append("(?:.*/)?")
            i += 3
        elif glob.startswith("**", i):
            out.append(".*")
            i += 2
        else:
            c = glob[i]
            out.append({"*": "[^/]*", "?": "[^/]"}.get(c, re.escape(c)))
            i += 1
    return re.compile("".join(out), re.DOTALL)
