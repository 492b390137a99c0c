"""What is told of a checkpoint once it is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypedDict

from det_core.storage import Manifest


class CheckpointRecord(TypedDict):
    """A complete checkpoint, as it is registered and journaled."""

    storage_id: str
    steps_completed: int
    metadata: dict[str, Any]
    resources: dict[str, int]
    """Relative POSIX path to size in bytes; folders end in a slash and have size 0."""
    run_id: str
    restart: int
    ordinal: int
    """Counts the checkpoints of one restart, from 1."""
    time: str
    """When it was committed, RFC 3339 in UTC."""


class Reports(Protocol):
    """What was reported before a checkpoint, and is to be on the disk when that is complete."""

    @property
    def file(self) -> Path | None:
        """The file that all of it is in, for another process to force to the disk; None: only :meth:`flush` can."""

    def flush(self) -> None:
        """Force all of it to the disk."""


def record_of(manifest: Manifest, metadata: dict[str, Any]) -> CheckpointRecord:
    """The record of a checkpoint that has just been committed."""
    header = manifest.header
    assert header is not None, "what was committed has a header"
    return CheckpointRecord(
        storage_id=header.storage_id,
        steps_completed=header.steps_completed,
        metadata=metadata,
        resources=manifest.resources,
        run_id=header.run_id,
        restart=header.restart,
        ordinal=header.ordinal,
        time=header.time,
    )
