"""Names: where things lie in a store, and what may come from outside as storage id, path or glob."""

from __future__ import annotations

import re
from collections.abc import Iterable

META_DIR = ".det_core"
"""The folder of a checkpoint that holds its manifest; of no checkpoint's files."""
MANIFEST_PATH = ".det_core/manifest.json"
METADATA_FILE = "metadata.json"
STAGING_DIR = ".det_core-tmp"
"""The folder of a store's root for what is being written or taken apart, and for marks."""
EVENT_FILES = "tensorboard"
RESERVED = (EVENT_FILES,)
"""Names in a store's root that are of no checkpoint."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""The category Cc of Unicode."""


def check_storage_id(storage_id: object) -> str:
    """Return ``storage_id`` if it can name one folder directly below a store's root.

    Raises:
        ValueError: it is no string, empty, begins with a dot, or holds a separator or a control character.
    """
    if not isinstance(storage_id, str):
        raise ValueError(f"storage_id must be a string, not {type(storage_id).__name__} ({storage_id!r})")
    if not storage_id:
        raise ValueError("storage_id is empty: pass the id that upload() or store_path() gave")
    if storage_id.startswith("."):
        raise ValueError(f"storage_id {storage_id!r} begins with a dot: it must be the bare name of a checkpoint")
    if "/" in storage_id or "\\" in storage_id:
        raise ValueError(f"storage_id {storage_id!r} holds a path separator: it must be the bare name of a checkpoint")
    if storage_id in RESERVED:
        raise ValueError(f"storage_id {storage_id!r} is the name of a folder that lies beside checkpoints")
    if _CONTROL.search(storage_id) or len(storage_id.encode("utf-8", "replace")) > 200:
        raise ValueError(f"storage_id {storage_id!r} holds a control character or is longer than 200 bytes")
    return storage_id


def event_files_of_run(run_id: str) -> str:
    """Return the folder below a store's root for the event files of a run without a master."""
    return f"{EVENT_FILES}/{run_id}"


def event_files_of_experiment(cluster_id: str, experiment_id: int) -> str:
    """Return the folder below a store's root for the event files of an experiment (wire contract, §8)."""
    return f"{cluster_id}/{EVENT_FILES}/experiment/{experiment_id}"


def is_relative_path(path: object) -> bool:
    """Whether ``path`` is relative, POSIX, normal, and stays inside the folder it is relative to."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def parent_folders(names: Iterable[str]) -> set[str]:
    """The folders that hold relative paths, and the folders above those; each ends in a slash."""
    inner = {name.rpartition("/")[0] for name in names}
    inner.discard("")
    return {f"{folder}/" for folder in inner}.union(*map(parents, inner))


def parents(path: str) -> list[str]:
    """The folders above a relative path, outermost first, each ending in a slash: ``a/b/c`` has ``a/`` and ``a/b/``."""
    parts = path.rstrip("/").split("/")[:-1]
    return ["/".join(parts[: i + 1]) + "/" for i in range(len(parts))]


def glob_pattern(glob: str) -> re.Pattern[str]:
    """A regular expression for a glob over relative paths: ``**`` any folders, ``*`` and ``?`` within one name."""
    out = []
    i = 0
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
