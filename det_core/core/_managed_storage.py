"""The checkpoint storage of a run under a master: as this process reaches it, and as the master knows it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core._env import Environment
from det_core._storage_settings import location
from det_core.backend.rest import MasterSession, storage_settings
from det_core.errors import CheckpointError, MissingExtra, UnknownToMaster
from det_core.storage import DirectoryStore, Store, open_store

SHARED_FS_MOUNT = Path("/determined_shared_fs")
"""Where a foreign cluster's containers find a storage of type ``shared_fs`` (wire contract, §3.2)."""


def open_configured_store(configured: Mapping[str, Any] | None, environment: Environment, *, foreign: bool) -> Store:
    """The store of the experiment's configuration; without one, a folder in the home folder.

    Args:
        configured: the section ``checkpoint_storage`` (§11.3).
        environment: says where the home folder is.
        foreign: whether another master than ours started this process.

    Raises:
        ValueError: the section names no store that det_core can open.
    """
    default = environment.home / "checkpoints"
    if foreign and configured and configured.get("type") == "shared_fs" and SHARED_FS_MOUNT.is_dir():
        return DirectoryStore(_inside(configured))
    chosen = configured if configured and configured.get("type") else None
    return open_store(chosen, default=default, scratch=environment.home / "scratch")


def _inside(configured: Mapping[str, Any]) -> Path:
    """The folder of a ``shared_fs`` in a container; ``storage_path`` is relative, or lies in ``host_path``."""
    path = str(configured.get("storage_path") or "")
    if os.path.isabs(path):
        path = os.path.relpath(path, str(configured["host_path"]))
    return SHARED_FS_MOUNT / path


def master_storage(chosen: Any, given: Store | None, *, foreign: bool) -> dict[str, Any] | None:
    """What a master is told of where checkpoints go (wire contract, §5.1); None: nothing that it could use.

    Args:
        chosen: what the script gave, or the section of the configuration.
        given: the store that the script named, if it did.
        foreign: whether it is another master than ours.
    """
    if isinstance(chosen, Mapping):
        return dict(chosen) if chosen.get("type") else None
    if isinstance(given, DirectoryStore):
        return storage_settings(given.root, foreign=foreign)
    return storage_settings(str(chosen), foreign=foreign) if chosen else None


def start_checkpoint_storage(session: MasterSession, storage_id: str | None, own: Any) -> dict[str, Any] | None:
    """Where the checkpoint to start from lies, if that is another storage than this run's own.

    It was made by another experiment, or before this one's configuration was changed.

    Args:
        session: talks to a master of ours.
        storage_id: the checkpoint; None: there is none.
        own: this run's storage, as the master was told of it.
    """
    if storage_id is None:
        return None
    from urllib.parse import quote

    try:
        found = session.call("GET", f"/api/v1/checkpoints/{quote(storage_id, safe='')}").get("checkpoint")
    except UnknownToMaster:
        return None
    storage = found.get("storage") if isinstance(found, Mapping) else None
    if not storage or location(storage) == location(own if isinstance(own, Mapping) else {}):
        return None
    return dict(storage)


def open_start_store(
    storage_id: str | None, start: Mapping[str, Any] | None, own: Store, environment: Environment
) -> dict[str, Store]:
    """The store of the checkpoint to start from, by its storage_id; empty if it lies in this run's own.

    Raises:
        CheckpointError: that store cannot be opened here.
    """
    if storage_id is None or start is None:
        return {}
    try:
        store = open_configured_store(start, environment, foreign=False)
    except (ValueError, MissingExtra) as e:
        raise CheckpointError(
            f"checkpoint {storage_id}, to start from, lies in a storage that cannot be opened: {e}"
        ) from e
    if isinstance(store, DirectoryStore) and store.root == own.root:
        return {}
    return {storage_id: store}
