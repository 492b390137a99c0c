"""Routes by which a trial tells of itself and asks (rows 1 and 3 to 7 of §4; §5.1, §5.4)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag

from det_core.master.api import _shapes as shapes
from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import Body, Id, Number, TrialId, answer, done

routes = Routes("trials")


class PrepareRunRequest(Body):
    """A run, and where it keeps checkpoints: as ``checkpoint_storage`` in a configuration."""

    run_id: Id
    checkpoint_storage: dict[str, Any] | None = None


class Progress(Body):
    """How far the trial is: units trained, or a fraction of the whole if ``is_raw``."""

    progress: Number
    is_raw: bool = False


def _form(value: Any) -> str:
    return "object" if isinstance(value, (dict, Progress)) else "number"


AnyProgress = Annotated[Annotated[Progress, Tag("object")] | Annotated[Number, Tag("number")], Discriminator(_form)]
"""All the forms that clients know (§1.2): a bare number, or an object with or without ``is_raw``."""


class StatusRequest(Body):
    """What the trial does, in its own words."""

    state: str = ""


class MetadataRequest(Body):
    """All of a run's metadata."""

    metadata: dict[str, Any] = Field(default_factory=dict)


class EarlyExitRequest(Body):
    """Why the trial gives up: EXITED_REASON_INVALID_HP, ..._INIT_INVALID_HP or ..._USER_REQUESTED_STOP."""

    reason: str


@routes.trial.post("/runs/start")
async def prepare_run(body: PrepareRunRequest, service: TheService, caller: TheCaller) -> Response:
    """Say where a run keeps its checkpoints. Equal storages have the same number."""
    caller.check(trial_id=body.run_id)
    storage_id = await service.run_prepare(body.run_id, body.checkpoint_storage)
    return answer({} if storage_id is None else {"storageId": storage_id})


@routes.trial.get("/trials/{trial_id}")
async def get_trial(trial_id: TrialId, service: TheService) -> Response:
    """One trial."""
    return answer({"trial": shapes.trial(await service.trial(trial_id))})


@routes.trial.get("/trials/{trial_id}/checkpoints")
async def trial_checkpoints(trial_id: TrialId, service: TheService) -> Response:
    """All checkpoints of a trial, newest first."""
    views = await service.trial_checkpoints(trial_id)
    return answer({"checkpoints": [shapes.checkpoint(view) for view in views]})


@routes.trial.post("/trials/{trial_id}/progress")
async def progress(trial_id: TrialId, body: AnyProgress, service: TheService, caller: TheCaller) -> Response:
    """Note how far the trial is."""
    told = body if isinstance(body, Progress) else Progress(progress=body)
    await service.progress(trial_id, told.progress, is_raw=told.is_raw, allocation_id=caller.allocation_id)
    return done()


@routes.trial.post("/trials/{trial_id}/runner/metadata")
async def set_status(trial_id: TrialId, body: StatusRequest, service: TheService, caller: TheCaller) -> Response:
    """Note what the trial does."""
    await service.set_status(trial_id, body.state, allocation_id=caller.allocation_id)
    return done()


@routes.trial.post("/runs/{trial_id}/metadata")
async def set_metadata(trial_id: TrialId, body: MetadataRequest, service: TheService, caller: TheCaller) -> Response:
    """Replace a run's metadata."""
    now = await service.set_metadata(trial_id, body.metadata, allocation_id=caller.allocation_id)
    return answer({"metadata": now})


@routes.trial.get("/runs/{trial_id}/metadata")
async def get_metadata(trial_id: TrialId, service: TheService) -> Response:
    """A run's metadata; empty if nothing was set."""
    return answer({"metadata": await service.get_metadata(trial_id)})


@routes.trial.post("/trials/{trial_id}/early_exit")
async def early_exit(trial_id: TrialId, body: EarlyExitRequest, service: TheService, caller: TheCaller) -> Response:
    """Note that the trial gives up, and why."""
    await service.early_exit(trial_id, body.reason, allocation_id=caller.allocation_id)
    return done()
