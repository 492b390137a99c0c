"""Checkpoints that a process completed, and did not live to register.

A process journals that it is about to make a checkpoint complete, makes it so, journals what it has made, and then
registers it. It may be killed between any two of these, and the checkpoint must not be lost: neither for the trial's
next run, nor for those who clear the storage. After the first step only the storage knows whether it is complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from det_core.errors import CheckpointNotFound
from det_core.master._errors import is_content_error
from det_core.master.service import _checkpoints
from det_core.master.service._threads import run_in_daemon_thread
from det_core.master.store import models, series
from det_core.storage import open_store

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._live import LiveTrial
    from det_core.master.service._state import ServiceState
    from det_core.master.store.models import Record

LOG = logging.getLogger("det_core")
STORAGE_TIMEOUT = 60.0
"""Maximum wait in seconds for the answer of a storage; then the trial goes on without."""


@dataclass(frozen=True)
class Doubt:
    """Checkpoints that were announced, and that only their storage can show to be complete.

    Attributes:
        trial: whose they are.
        storage: the configuration of the storage.
        records: where they were announced.
    """

    trial: LiveTrial
    storage: Mapping[str, Any] | None
    records: Sequence[Record]


async def make_up(service: ServiceState, allocation_id: str) -> Doubt | None:
    """Register what the process of an allocation has journaled; return what is to be looked for in the storage.

    Raises:
        Exception: If our database failed; to be called again.
    """
    allocation = service.live.allocations.get(allocation_id)
    if allocation is None:
        return None
    trial = allocation.trial
    run_id = allocation.run_id

    def unknown(session: Session, kind: str) -> Sequence[Record]:
        rows = series.records(session, trial.id, kind=kind, run_id=run_id)
        return [row for row in rows if not _is_registered(session, row)]

    def doubt(session: Session) -> Doubt | None:
        rows = unknown(session, "checkpoint_commit")
        chosen = _checkpoints.storage_of_run(session, allocation_id)
        if not rows:
            return None
        return Doubt(trial, _checkpoints.find_storage(session, chosen, trial.experiment.id), rows)

    for row in await service.store.read(lambda session: unknown(session, "checkpoint")):
        await _register(service, trial, row.body, row.time)
    return await service.store.read(doubt)


def _is_registered(session: Session, row: Record) -> bool:
    """Return whether the checkpoint of a record is registered, or can never be: its ID is not a string to look for."""
    uuid = row.body.get("storage_id")
    try:
        return not isinstance(uuid, str) or session.get(models.Checkpoint, uuid) is not None
    except ValueError:  # half a surrogate pair, or a NUL, which not every database takes
        return True


async def look(service: ServiceState, doubt: Doubt) -> None:
    """Look for announced checkpoints in their storage, and register those that are complete."""
    for row in doubt.records:
        uuid = str(row.body.get("storage_id"))
        try:
            found = await asyncio.wait_for(run_in_daemon_thread(_found, service, doubt.storage, uuid), STORAGE_TIMEOUT)
        except Exception as e:  # a driver may raise anything, and the trial is to go on
            what = "its storage does not answer" if isinstance(e, asyncio.TimeoutError) else str(e)
            LOG.warning("trial %d: whether checkpoint %s is complete is not known: %s", doubt.trial.id, uuid, what)
            continue
        if found is not None:
            LOG.info("trial %d: checkpoint %s was complete when its process died", doubt.trial.id, uuid)
            await _register(service, doubt.trial, found, row.time)


async def _register(service: ServiceState, trial: LiveTrial, body: Mapping[str, Any], time: float) -> None:
    try:
        allocation_id = None if trial.allocation is None else trial.allocation.id
        await _checkpoints.from_journal(service, trial.task_id, allocation_id, body, time)
    except Exception as e:
        if not is_content_error(e):
            raise
        LOG.warning("trial %d: ignoring a checkpoint in its journal: %r", trial.id, e)


def _found(service: ServiceState, storage: Mapping[str, Any] | None, uuid: str) -> dict[str, Any] | None:
    """Return a checkpoint as it would have been journaled, None if it is incomplete."""
    store = open_store(storage, service.settings.home / "checkpoints")
    try:
        checkpoint = store.open(uuid)
        if not checkpoint.manifest.verified:
            return None
        resources = checkpoint.manifest.resources
        return {"storage_id": uuid, "metadata": checkpoint.metadata(), "resources": resources}
    except CheckpointNotFound:
        return None
    finally:
        store.close()
