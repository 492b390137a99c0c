"""From what a user writes as ``checkpoint_storage`` to a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core.storage._directory import DirectoryStore
from det_core.storage._store import Store

COMMON = ("save_experiment_best", "save_trial_best", "save_trial_latest")
KEYS = {
    "directory": ("container_path",),
    "shared_fs": ("host_path", "storage_path", "propagation", "container_path", "checkpoint_path", "tensorboard_path"),
}
REQUIRED = {"directory": "container_path", "shared_fs": "host_path"}


def open_store(checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None, default: Path) -> Store:
    """Return the store that ``checkpoint_storage`` names. Nothing is made or read yet.

    Args:
        checkpoint_storage: a folder's path, a ``file://`` URL, or a mapping as in an experiment's configuration:
            ``{"type": "directory", "container_path": …}`` or ``{"type": "shared_fs", "host_path": …,
            "storage_path": …}``. None: ``default``.
        default: the folder to use if nothing else is said.

    Raises:
        ValueError: it names no store that det_core can open; every wrong key is named at once.
    """
    if checkpoint_storage is None:
        return DirectoryStore(default)
    if isinstance(checkpoint_storage, Mapping):
        return _from_mapping(checkpoint_storage)
    if isinstance(checkpoint_storage, str | os.PathLike):
        return _from_text(os.fspath(checkpoint_storage))
    raise ValueError(f"checkpoint_storage must be a path, a URL or a dict, not {type(checkpoint_storage).__name__}")


def _from_text(text: str) -> Store:
    from urllib.parse import unquote, urlsplit

    if not text:
        raise ValueError("checkpoint_storage is empty: pass a folder, or None for the run's own folder")
    if "://" not in text and not text.startswith("file:"):
        return DirectoryStore(Path(text).expanduser())
    url = urlsplit(text)
    if url.scheme != "file":
        raise ValueError(
            f"checkpoint_storage={text!r}: {url.scheme}:// cannot be opened by this version of det_core; use a "
            "directory (a path or a file:// URL) that every rank shares"
        )
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise ValueError(f"checkpoint_storage={text!r}: a file URL has the form file:///absolute/path and no more")
    path = unquote(url.path)
    if not path.startswith("/"):
        raise ValueError(f"checkpoint_storage={text!r}: the path of a file URL must be absolute, as in file:///data")
    return DirectoryStore(path)


def _from_mapping(config: Mapping[str, Any]) -> Store:
    kind = config.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(
            f"checkpoint_storage.type is {kind!r}: this version of det_core opens {' and '.join(sorted(KEYS))}"
        )
    required = REQUIRED[kind]
    problems = [] if required in config else [f"{required} is missing: give it an absolute path"]
    for key, value in config.items():
        if key == "type" or (value is None and key != required):
            continue
        if key in COMMON:
            if type(value) is not int or value < 0:
                problems.append(f"{key} is {value!r}: give it an integer of at least 0")
        elif key not in KEYS[kind]:
            problems.append(f"{key} is no key of type {kind}: there are {', '.join((*KEYS[kind], *COMMON))}")
        elif not isinstance(value, str | os.PathLike) or not os.fspath(value):
            problems.append(f"{key} is {value!r}: give it a path")
        elif key == required and not os.path.isabs(value):
            problems.append(f"{key} is {value!r}: give it an absolute path")
    if not problems and kind == "shared_fs":
        path = _shared_path(os.fspath(config["host_path"]), config.get("storage_path"), problems)
    elif not problems:
        path = os.fspath(config["container_path"])
    if problems:
        raise ValueError("checkpoint_storage: " + "; ".join(problems))
    return DirectoryStore(path)


def _shared_path(host_path: str, storage_path: Any, problems: list[str]) -> str:
    host = os.path.normpath(host_path)
    path = os.path.normpath(os.path.join(host, os.fspath(storage_path or "")))
    if os.path.commonpath([host, path]) != host:
        problems.append(f"storage_path is {storage_path!r}: it must lie inside host_path {host_path!r}")
    return path
