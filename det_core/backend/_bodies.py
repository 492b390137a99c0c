"""Bodies of requests of the wire contract, §5. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from det_core import _clock
from det_core._storage_settings import BUCKET_SCHEMES
from det_core.backend._operations import Master

FIRST_WITH_FRACTIONS = (0, 37)
"""First release of Determined that takes progress as a fraction."""


def metrics(trial_id: int, trial_run_id: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the journal as a report of metrics."""
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


def progress(report: Mapping[str, Any], master: Master) -> Any:
    """Return a report of progress in the form that a master of its release takes, or None if there is none.

    Args:
        report: ``units`` and ``length`` of an operation, or ``fraction`` of the whole.
        master: Identity of the master.
    """
    takes_units_only = master.release is not None and master.release < FIRST_WITH_FRACTIONS
    if "fraction" in report:
        return None if takes_units_only else {"progress": report["fraction"], "is_raw": True}
    if takes_units_only:
        return float(report["units"])
    if master.has_operations is False:
        return {"progress": min(report["units"] / max(report["length"], 1), 1.0), "is_raw": True}
    return {"progress": float(report["units"])}


def checkpoint(
    record: Mapping[str, Any], *, task_id: str, allocation_id: str | None, storage_id: int | None
) -> dict[str, Any]:
    """Return the registration of a complete checkpoint.

    Args:
        record: Record of the journal.
        task_id: Task that has saved it.
        allocation_id: Run of the task that has saved it; None for an unmanaged one.
        storage_id: The master's number of the storage.
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
    """Return the report of the files that are left of a checkpoint."""
    return {"checkpoints": [{"uuid": storage_id, "resources": {"resources": sizes(resources)}}]}


def storage_settings(chosen: Mapping[str, Any] | str | None, *, foreign: bool) -> dict[str, Any] | None:
    """Return a storage as a section ``checkpoint_storage`` (§5.1), or None if the master cannot use it.

    Args:
        chosen: Such a section, a directory, or a URL.
        foreign: Whether it is for a Determined master.
    """
    if not chosen:
        return None
    if not isinstance(chosen, str):
        return dict(chosen) if chosen.get("type") else None
    scheme, slashes, rest = chosen.partition("://")
    if not slashes:
        return {"type": "shared_fs", "host_path": os.path.abspath(chosen)}
    bucket, _, prefix = rest.partition("/")
    if scheme in BUCKET_SCHEMES:
        return {"type": BUCKET_SCHEMES[scheme], "bucket": bucket, "prefix": prefix}
    if foreign:
        return None  # the type is one of det_core's own
    return {"type": "fsspec", "url": chosen}


def sizes(resources: Mapping[str, int]) -> dict[str, str]:
    """Return sizes by path as text, in which int64 travels."""
    return {path: str(size) for path, size in resources.items()}
