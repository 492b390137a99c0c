"""Checkpoint storage of a run under a master: as this process opens it, and as the master records it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core._env import Environment
from det_core._storage_settings import location
from det_core.backend._master import storage_settings
from det_core.errors import CheckpointError, MissingExtra, UnknownToMaster
from det_core.protocol import MasterSession
from det_core.storage import DirectoryStore, Store, open_store

SHARED_FS_MOUNT = Path("/determined_shared_fs")
"""Mount point of a storage of type ``shared_fs`` in the containers of a Determined cluster (wire contract, §3.2)."""


def open_configured_store(
    configured: Mapping[str, Any] | None, environment: Environment, *, is_determined: bool
) -> Store:
    """Open the store of the experiment's configuration, by default a directory below the home directory.

    Args:
        configured: section ``checkpoint_storage`` (§11.3).
        environment: has the home directory.
        is_determined: whether a Determined master started this process.

    Raises:
        ValueError: If det_core cannot open a store of this section.
    """
    default = environment.home / "checkpoints"
    if is_determined and configured and configured.get("type") == "shared_fs" and SHARED_FS_MOUNT.is_dir():
        return DirectoryStore(_inside(configured))
    chosen = None
    if configured and configured.get("type"):
        chosen = configured
    return open_store(chosen, default=default, scratch=environment.home / "scratch")


def _inside(configured: Mapping[str, Any]) -> Path:
    """Return the directory of a ``shared_fs`` in a container; ``storage_path`` is relative, or below ``host_path``."""
    path = str(configured.get("storage_path") or "")
    if os.path.isabs(path):
        path = os.path.relpath(path, str(configured["host_path"]))
    return SHARED_FS_MOUNT / path


def master_storage(chosen: Any, script_store: Store | None, *, is_determined: bool) -> dict[str, Any] | None:
    """Return the storage settings for the master (wire contract, §5.1), or None if it could not use any.

    Args:
        chosen: argument of the script, or section of the configuration.
        script_store: store that the script names, or None.
        is_determined: whether it is a Determined master.
    """
    if isinstance(chosen, Mapping):
        return dict(chosen) if chosen.get("type") else None
    if isinstance(script_store, DirectoryStore):
        return storage_settings(script_store.root, is_determined=is_determined)
    if not chosen:
        return None
    return storage_settings(str(chosen), is_determined=is_determined)


def start_checkpoint_storage(session: MasterSession, storage_id: str | None, own: Any) -> dict[str, Any] | None:
    """Return the storage settings of the checkpoint to start from, or None if they are this run's own.

    They differ for a checkpoint of another experiment, or from before this one's configuration was changed.

    Args:
        session: session with a det_core master.
        storage_id: the checkpoint, or None.
        own: storage settings of this run, as registered with the master.
    """
    if storage_id is None:
        return None
    from urllib.parse import quote

    try:
        checkpoint = session.call("GET", f"/api/v1/checkpoints/{quote(storage_id, safe='')}").get("checkpoint")
    except UnknownToMaster:
        return None
    if not isinstance(checkpoint, Mapping):
        return None
    storage = checkpoint.get("storage")
    own_location = location(own if isinstance(own, Mapping) else {})
    if not storage or location(storage) == own_location:
        return None
    return dict(storage)


def open_start_store(
    storage_id: str | None, start: Mapping[str, Any] | None, own: Store, environment: Environment
) -> dict[str, Store]:
    """Open the store of the checkpoint to start from; return it by storage_id, or nothing if it is this run's own.

    Raises:
        CheckpointError: If that store cannot be opened here.
    """
    if storage_id is None or start is None:
        return {}
    try:
        store = open_configured_store(start, environment, is_determined=False)
    except (ValueError, MissingExtra) as e:
        raise CheckpointError(
            f"cannot open the storage of checkpoint {storage_id}, from which this run starts: {e}"
        ) from e
    if isinstance(store, DirectoryStore) and store.root == own.root:
        return {}
    return {storage_id: store}
