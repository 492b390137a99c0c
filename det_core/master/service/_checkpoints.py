"""Checkpoints: registered, read, their deletion noted (§5.7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core.errors import StoreConflict
from det_core.master._errors import Conflict, Fenced, Invalid, NotFound
from det_core.master.service import _storages
from det_core.master.store import checkpoints, storages, trials
from det_core.storage import check_storage_id

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._hub import Hub

STEPS = "steps_completed"


async def register(
    hub: Hub,
    uuid: str,
    task_id: str,
    *,
    allocation_id: str | None,
    storage_id: int | None,
    metadata: Mapping[str, Any],
    resources: Mapping[str, int],
    state: str,
    report_time: float | None,
) -> None:
    """Note a checkpoint that is complete in its storage."""
    if state not in ("COMPLETED", "UNSPECIFIED"):
        raise Invalid(f"checkpoint {uuid}: only COMPLETED ones can be reported, not {state}")
    check(uuid, metadata)
    if allocation_id is not None and allocation_id not in hub.live.allocations:
        raise Fenced(f"checkpoint {uuid}: allocation {allocation_id} has ended")

    def write(conn: Session) -> int:
        trial = trials.by_task_id(conn, task_id)
        if trial is None:
            raise NotFound(f"checkpoint {uuid}: there is no trial of task {task_id}")
        if storage_id is not None and storages.get(conn, storage_id) is None:
            raise Invalid(f"checkpoint {uuid}: there is no storage {storage_id}")
        checkpoints.register(
            conn,
            uuid,
            experiment_id=trial.experiment_id,
            trial_id=trial.id,
            task_id=task_id,
            allocation_id=allocation_id,
            storage_id=_storages.of_run(conn, allocation_id) if storage_id is None else storage_id,
            steps_completed=metadata[STEPS],
            metadata=metadata,
            resources=resources,
            report_time=report_time,
        )
        return trial.id

    try:
        trial_id = await hub.store.write(write)
    except StoreConflict as e:
        raise Conflict(str(e)) from None
    hub.subscriptions.publish(("trial", trial_id))


def check(uuid: str, metadata: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint can be kept.

    Raises:
        Invalid: If its ID cannot name a directory, or its metadata lack the step.
    """
    try:
        check_storage_id(uuid)
    except (TypeError, ValueError) as e:
        raise Invalid(f"checkpoint: {e}") from None
    steps = metadata.get(STEPS)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 2**63:
        raise Invalid(f"checkpoint {uuid}: metadata.{STEPS} must be an integer, 0 or more, not {steps!r}")


async def from_journal(
    hub: Hub,
    task_id: str,
    allocation_id: str | None,
    body: Mapping[str, Any],
    time: float,
    storage_id: int | None = None,
) -> None:
    """Register a checkpoint by its record in a journal: its process is dead, or had no master.

    Raises:
        Invalid: If the record does not describe a checkpoint.
    """
    uuid = str(body.get("storage_id"))
    metadata = body.get("metadata")
    resources = body.get("resources")
    if not isinstance(metadata, Mapping) or not isinstance(resources, Mapping):
        raise Invalid(f"checkpoint {uuid}: metadata and resources must be objects")
    sizes = list(resources.values())
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes) or sum(sizes) >= 2**63:
        raise Invalid(f"checkpoint {uuid}: resources must be sizes in bytes")
    await register(
        hub,
        uuid,
        task_id,
        allocation_id=allocation_id,
        storage_id=storage_id,
        metadata=metadata,
        resources=resources,
        state="COMPLETED",
        report_time=time,
    )


async def patch(hub: Hub, found: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
    """Note what remains of checkpoints."""

    def write(conn: Session) -> None:
        for uuid, resources in found:
            if checkpoints.get(conn, uuid) is None:
                raise no_checkpoint(uuid)
            if resources is not None:
                checkpoints.set_resources(conn, uuid, resources)

    await hub.store.write(write)


def no_checkpoint(uuid: str) -> NotFound:
    """Return the error for a checkpoint that does not exist."""
    return NotFound(f"there is no checkpoint {uuid}")


async def set_metadata(hub: Hub, uuid: str, metadata: Mapping[str, Any]) -> None:
    """Replace a checkpoint's metadata."""

    def write(conn: Session) -> None:
        if checkpoints.get(conn, uuid) is None:
            raise no_checkpoint(uuid)
        checkpoints.set_metadata(conn, uuid, metadata)

    await hub.store.write(write)


async def use(hub: Hub, trial_id: int, uuid: str) -> None:
    """Accept that a trial uses a checkpoint, if both exist; stock clients report it, and nothing reads it.

    Raises:
        NotFound: If the trial or the checkpoint does not exist.
    """

    def check(conn: Session) -> None:
        if trials.get(conn, trial_id) is None:
            raise NotFound(f"there is no trial {trial_id}")
        if checkpoints.get(conn, uuid) is None:
            raise no_checkpoint(uuid)

    await hub.store.read(check)
