"""Routes about checkpoints (rows 11 to 13 of §4; §5.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi.responses import Response
from pydantic import Field

from det_core.master._errors import Forbidden, Invalid
from det_core.master.api._auth import Caller
from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import (
    IN_BODY,
    Body,
    ExperimentId,
    Id,
    Limit,
    Offset,
    Size,
    Timestamp,
    TrialId,
    answer,
    answer_page,
    done,
    rows_of_page,
    state_in,
)
from det_core.master.service import _checkpoints, _queries, _retention
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.protocol.records import CheckpointView

routes = Routes("checkpoints")


class CheckpointReport(Body):
    """A checkpoint that is complete in its storage. ``resources``: its files and their sizes."""

    uuid: str
    task_id: str
    allocation_id: str | None = None
    storage_id: Id | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    resources: dict[str, Size] = Field(default_factory=dict)
    state: str = "STATE_COMPLETED"
    report_time: Timestamp | None = None


class Remaining(Body):
    """Rest of a checkpoint: files and their sizes."""

    resources: dict[str, Size] = Field(default_factory=dict)


class CheckpointPatch(Body):
    """A checkpoint, and what is left of it."""

    uuid: str
    resources: Remaining | None = None


class Metadata(Body):
    """All of a checkpoint's metadata."""

    metadata: dict[str, Any] | None = None


@routes.trial.post("/checkpoints")
async def report_checkpoint(body: CheckpointReport, service: TheService, caller: TheCaller) -> Response:
    """Record a checkpoint that is complete. The same again changes nothing."""
    caller.check(task_id=body.task_id)
    if body.allocation_id is not None:
        caller.check(allocation_id=body.allocation_id)
    state = state_in(body.state)
    await _checkpoints.register(
        service,
        body.uuid,
        body.task_id,
        allocation_id=body.allocation_id or caller.allocation_id,
        storage_id=body.storage_id,
        metadata=body.metadata,
        resources=body.resources,
        state="COMPLETED" if state == "UNSPECIFIED" else state,
        report_time=body.report_time,
    )
    return done()


@routes.trial.get("/checkpoints/{uuid}")
async def get_checkpoint(uuid: str, service: TheService, caller: TheCaller) -> Response:
    """Return one checkpoint."""
    view = await _checkpoints.get(service, uuid)
    await _check_readable(view, service, caller)
    return answer({"checkpoint": encode(view)})


async def _check_readable(view: CheckpointView, service: TheService, caller: Caller) -> None:
    """Let a trial read the checkpoints of its experiment, and those that it may have been warm-started from."""
    try:
        caller.check(experiment_id=view.experiment_id)
    except Forbidden:
        assert caller.token is not None
        searcher = (await _queries.experiment(service, caller.token["experiment_id"])).config["searcher"]
        uuid, trial_id = searcher.get("source_checkpoint_uuid"), searcher.get("source_trial_id")
        if view.uuid != uuid and view.trial_id != trial_id:
            raise


@routes.trial.get("/experiments/{experiment_id}/checkpoints")
async def experiment_checkpoints(
    experiment_id: ExperimentId, service: TheService, offset: Offset = 0, limit: Limit = 0
) -> Response:
    """Answer the checkpoints of an experiment, newest first, in pages."""
    views, total = await _checkpoints.page(service, rows_of_page(limit), offset, experiment_id=experiment_id)
    return await answer_page("checkpoints", encode, views, total, offset=offset, limit=limit)


@routes.trial.get("/trials/{trial_id}/checkpoints")
async def trial_checkpoints(trial_id: TrialId, service: TheService, offset: Offset = 0, limit: Limit = 0) -> Response:
    """Answer the checkpoints of a trial, newest first, in pages."""
    views, total = await _checkpoints.page(service, rows_of_page(limit), offset, trial_id=trial_id)
    return await answer_page("checkpoints", encode, views, total, offset=offset, limit=limit)


@routes.trial.patch("/checkpoints")
async def patch_checkpoints(
    service: TheService, caller: TheCaller, checkpoints: Annotated[list[CheckpointPatch], IN_BODY]
) -> Response:
    """Record what is left of checkpoints: nothing is DELETED, less than before PARTIALLY_DELETED."""
    if caller.token is not None:
        for patch in checkpoints:
            caller.check(trial_id=(await _checkpoints.get(service, patch.uuid)).trial_id)
    await _checkpoints.patch(
        service, [(p.uuid, None if p.resources is None else p.resources.resources) for p in checkpoints]
    )
    return done()


@routes.user.post("/checkpoints/rm")
async def remove_files(
    service: TheService,
    checkpoint_uuids: Annotated[list[str], IN_BODY],
    checkpoint_globs: Annotated[list[str] | None, IN_BODY] = None,
) -> Response:
    """Delete the files that match a pattern, by default all, in these checkpoints. They go in the background."""
    await _retention.delete(service, checkpoint_uuids, ["**/*"] if checkpoint_globs is None else checkpoint_globs)
    return done()


@routes.user.delete("/checkpoints")
async def delete_checkpoints(service: TheService, checkpoint_uuids: Annotated[list[str], IN_BODY]) -> Response:
    """Delete checkpoints. They go in the background."""
    await _retention.delete(service, checkpoint_uuids)
    return done()


@routes.user.post("/checkpoints/{uuid}/metadata")
async def set_checkpoint_metadata(
    uuid: str,
    service: TheService,
    metadata: Annotated[dict[str, Any] | None, IN_BODY] = None,
    checkpoint: Annotated[Metadata | None, IN_BODY] = None,
) -> Response:
    """Replace what the master answers as a checkpoint's metadata; the file in the storage stays as it is."""
    if metadata is None and checkpoint is not None:
        metadata = checkpoint.metadata
    if metadata is None:
        raise Invalid("body metadata: expected an object")
    return answer({"checkpoint": encode(await _checkpoints.set_metadata(service, uuid, metadata))})
