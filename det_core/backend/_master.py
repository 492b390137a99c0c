"""A master by its own answer, and the bodies of requests as it takes them (wire contract, §1.2 and §5)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from det_core import _clock
from det_core._storage_settings import BUCKET_SCHEMES
from det_core.protocol import MasterSession

SOFTWARE = "det_core"
LAST_WITH_OPERATIONS = (0, 37)
"""Last release of Determined whose searches give operations; from then on, it takes progress as a fraction."""


@dataclass(frozen=True)
class MasterInfo:
    """Identity of a master.

    Attributes:
        version: Version of its software.
        software: ``det_core`` for one of this project.
        cluster_id: Lasting ID.
    """

    version: str = ""
    software: str = ""
    cluster_id: str = ""

    @property
    def is_det_core(self) -> bool:
        """Whether it is of det_core, and takes the journal as it is."""
        return self.software == SOFTWARE

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version of a Determined master, None if unknown."""
        match = re.match(r"v?(\d+)\.(\d+)", self.version)
        if match is None or self.is_det_core:
            return None
        return int(match[1]), int(match[2])

    @property
    def has_operations(self) -> bool | None:
        """Whether its searches give operations; None if only a request can tell.

        Without them, a trial trains to ``searcher.max_length``, and its validations steer the search.
        """
        if self.is_det_core:
            return True
        if self.release is None:
            return None
        return self.release <= LAST_WITH_OPERATIONS


def get_master_info(session: MasterSession) -> MasterInfo:
    """Ask a master for its identity.

    Raises:
        MasterError: If it does not answer, or is not a master.
    """
    answer: Any = session.call("GET", "/api/v1/master")
    if not isinstance(answer, dict):
        answer = {}
    return MasterInfo(
        version=str(answer.get("version") or ""),
        software=str(answer.get("software") or ""),
        cluster_id=str(answer.get("clusterId") or ""),
    )


def metrics_body(trial_id: int, trial_run_id: int, record: Mapping[str, Any]) -> dict[str, Any]:
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


def progress_body(report: Mapping[str, Any], master: MasterInfo) -> Any:
    """Return a report of progress as a Determined master of this release takes it, or None if it takes none.

    Args:
        report: ``units`` and ``length`` of an operation, or ``fraction`` of the whole.
        master: Identity of the master.
    """
    takes_units_only = master.release is not None and master.release < LAST_WITH_OPERATIONS
    if "fraction" in report:
        return None if takes_units_only else {"progress": report["fraction"], "is_raw": True}
    if takes_units_only:
        return float(report["units"])
    if master.has_operations is False:
        return {"progress": min(report["units"] / max(report["length"], 1), 1.0), "is_raw": True}
    return {"progress": float(report["units"])}


def storage_settings(chosen: Mapping[str, Any] | str | None, *, is_determined: bool) -> dict[str, Any] | None:
    """Return a storage as a section ``checkpoint_storage`` (§5.1), or None if the master cannot use it.

    Args:
        chosen: Such a section, a directory, or a URL.
        is_determined: Whether it is for a Determined master.
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
    if is_determined:
        return None  # the type is one of det_core's own
    return {"type": "fsspec", "url": chosen}


def resource_sizes(resources: Mapping[str, int]) -> dict[str, str]:
    """Return sizes by path as text, in which int64 travels."""
    return {path: str(size) for path, size in resources.items()}
