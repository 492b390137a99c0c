"""Checkpoints that a process made, and did not live to register.

A process journals that it is about to make a checkpoint complete, makes it so, journals what it has made, and then
registers it. It may be killed between any two of these, and the checkpoint must not be lost: neither for the trial's
next run, nor for those who clear the storage. After the first step only the storage knows whether it is complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from det_core.errors import CheckpointNotFound, DetCoreError
from det_core.master.service import _checkpoints, _storages
from det_core.master.store import checkpoints, metrics
from det_core.storage import open_store

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from det_core.master.service._hub import Hub
    from det_core.master.service._live import LiveTrial
    from det_core.master.store.metrics import RecordRow

LOG = logging.getLogger("det_core")
PATIENCE = 60.0
"""Seconds that a storage may take to answer before the trial goes on without an answer."""


@dataclass(frozen=True)
class Doubt:
    """Checkpoints of which only their storage knows whether they are complete.

    Attributes:
        trial: whose they are.
        storage: the configuration of the storage.
        records: where they were announced.
    """

    trial: LiveTrial
    storage: Mapping[str, Any] | None
    records: list[RecordRow]


async def make_up(hub: Hub, allocation_id: str) -> Doubt | None:
    """Register what the process of an allocation has journaled; returns what is to be looked for in the storage."""
    allocation = hub.live.allocations.get(allocation_id)
    if allocation is None:
        return None
    trial, run_id = allocation.trial, allocation.run_id

    def unknown(conn: Connection, kind: str) -> list[RecordRow]:
        rows = metrics.records(conn, trial.id, kind=kind, run_id=run_id)
        return [row for row in rows if checkpoints.get(conn, str(row.body.get("storage_id"))) is None]

    def doubt(conn: Connection) -> Doubt | None:
        rows = unknown(conn, "checkpoint_commit")
        chosen = _storages.of_run(conn, allocation_id)
        return Doubt(trial, _storages.config_of(conn, chosen, trial.experiment.id), rows) if rows else None

    try:
        for row in await hub.store.read(lambda conn: unknown(conn, "checkpoint")):
            await _register(hub, trial, row.body, row.time)
        return await hub.store.read(doubt)
    except DetCoreError as e:
        LOG.warning("allocation %s: whether it has left checkpoints is not known: %s", allocation_id, e)
        return None


async def look(hub: Hub, doubt: Doubt) -> None:
    """Look for announced checkpoints in their storage, and register those that are complete."""
    for row in doubt.records:
        uuid = str(row.body.get("storage_id"))
        try:
            found = await asyncio.wait_for(asyncio.to_thread(_found, hub, doubt.storage, uuid), PATIENCE)
        except Exception as e:  # a driver may raise anything, and the trial is to go on
            what = "its storage does not answer" if isinstance(e, asyncio.TimeoutError) else str(e)
            LOG.warning("trial %d: whether checkpoint %s is complete is not known: %s", doubt.trial.id, uuid, what)
            continue
        if found is not None:
            LOG.info("trial %d: checkpoint %s was complete when its process died", doubt.trial.id, uuid)
            await _register(hub, doubt.trial, found, row.time)


async def _register(hub: Hub, trial: LiveTrial, body: Mapping[str, Any], time: float) -> None:
    try:
        await _checkpoints.from_journal(hub, trial, body, time)
    except (DetCoreError, LookupError, TypeError, ValueError) as e:
        LOG.warning("trial %d: a checkpoint in its journal is passed over: %s", trial.id, e)


def _found(hub: Hub, storage: Mapping[str, Any] | None, uuid: str) -> dict[str, Any] | None:
    """A checkpoint as it would have been journaled; None: it is not complete."""
    store = open_store(storage, hub.settings.home / "checkpoints")
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
