"""The bodies of the wire contract, §5: pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from det_core import _clock
from det_core._storage_settings import BUCKET_SCHEMES
from det_core.backend._rest_master import Master


def metrics(trial_id: int, trial_run_id: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the journal as a metrics report."""
    values: dict[str, Any] = {"avgMetrics": record["metrics"]}
    if record.get("batch_metrics") is not None:
        values["batchMetrics"] = record["batch_metrics"]
    return {
        "group": record["group"],
        "metrics": {
            "trialId": trial_id,
            "trialRunId": trial_run_id,
            "stepsCompleted": record["steps_completed"],
            "reportTime": _clock.iso(record["time"]),
            "metrics": values,
        },
    }


def progress(said: Mapping[str, Any], master: Master) -> Any:
    """What was said of progress, as a master of that release takes it; None: it has no way to take it.

    Args:
        said: ``units`` and ``length`` of an operation, or ``fraction`` of the whole.
        master: the master.
    """
    old = master.release is not None and master.release < (0, 37)
    if "fraction" in said:
        return None if old else {"progress": said["fraction"], "is_raw": True}
    if old:
        return float(said["units"])
    if master.has_operations is False:
        return {"progress": min(said["units"] / max(said["length"], 1), 1.0), "is_raw": True}
    return {"progress": float(said["units"])}


def checkpoint(
    record: Mapping[str, Any], *, task_id: str, allocation_id: str | None, storage_id: int | None
) -> dict[str, Any]:
    """The registration of a complete checkpoint.

    Args:
        record: as it is journaled.
        task_id: whose it is.
        allocation_id: which run of the task has made it; None for an unmanaged one.
        storage_id: the master's number of the storage.
    """
    return {
        "uuid": record["storage_id"],
        "taskId": task_id,
        "allocationId": allocation_id,
        "storageId": storage_id,
        "metadata": dict(record["metadata"]),
        "resources": sizes(record["resources"]),
        "state": "STATE_COMPLETED",
        "training": {},
        "reportTime": record["time"],
    }


def remains(storage_id: str, resources: Mapping[str, int]) -> dict[str, Any]:
    """What is left of a checkpoint."""
    return {"checkpoints": [{"uuid": storage_id, "resources": {"resources": sizes(resources)}}]}


def storage_settings(chosen: Mapping[str, Any] | str | None, *, foreign: bool) -> dict[str, Any] | None:
    """Where checkpoints go, as a section ``checkpoint_storage`` (§5.1); None: nothing that the master could use.

    Args:
        chosen: such a section, a folder, or a URL.
        foreign: whether it is another master than ours.
    """
    if not isinstance(chosen, str):
        return dict(chosen) if chosen and chosen.get("type") else None
    scheme, slashes, rest = chosen.partition("://")
    if not slashes:
        return {"type": "shared_fs", "host_path": os.path.abspath(chosen)}
    bucket, _, prefix = rest.partition("/")
    if scheme in BUCKET_SCHEMES:
        return {"type": BUCKET_SCHEMES[scheme], "bucket": bucket, "prefix": prefix}
    return None if foreign else {"type": "fsspec", "url": chosen}


def sizes(resources: Mapping[str, int]) -> dict[str, str]:
    """Path to size, the sizes as the strings that int64 travels in."""
    return {path: str(size) for path, size in resources.items()}
