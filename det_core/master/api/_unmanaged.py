"""Routes of trials that somebody else runs (rows 33 to 35 of §4; §9)."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response
from pydantic import Field

from det_core.master._errors import Invalid
from det_core.master.api import _shapes as shapes
from det_core.master.api._routing import Routes, TheService
from det_core.master.api._types import Body, Id, Timestamp, TrialId, answer, state_in
from det_core.protocol.wire import to_wire

routes = Routes("unmanaged")


class CreateTrialRequest(Body):
    """A trial of an unmanaged experiment."""

    experiment_id: Id
    hparams: dict[str, Any] = Field(default_factory=dict)
    unmanaged: bool = True


class PutTrialRequest(Body):
    """A trial, and the caller's own name for it. ``start_time``: when it began, if that was before."""

    create_trial_request: CreateTrialRequest
    external_trial_id: str
    start_time: Timestamp | None = None


class StartTrialRequest(Body):
    """Whether a trial that was started before may go on."""

    resume: bool = False


class PatchTrialRequest(Body):
    """A sign of life, and perhaps a new state. ``end_time``: when it ended, if that was before."""

    state: str | None = None
    end_time: Timestamp | None = None


@routes.user.post("/trials")
async def create_trial(body: CreateTrialRequest, service: TheService) -> Response:
    """A new trial of an unmanaged experiment."""
    _check(body)
    view = await service.create_trial(body.experiment_id, body.hparams)
    return answer({"trial": shapes.trial(view)})


@routes.user.put("/trials")
async def put_trial(body: PutTrialRequest, service: TheService) -> Response:
    """The trial of that external id, created if there is none."""
    wanted = body.create_trial_request
    _check(wanted)
    view = await service.put_trial(
        wanted.experiment_id, body.external_trial_id, wanted.hparams, start_time=body.start_time
    )
    return answer({"trial": shapes.trial(view)})


def _check(body: CreateTrialRequest) -> None:
    if not body.unmanaged:
        raise Invalid("unmanaged: only trials that the master does not run can be created; a search creates its own")


@routes.user.post("/trials/{trial_id}/start")
async def start_trial(trial_id: TrialId, body: StartTrialRequest, service: TheService) -> Response:
    """Begin another attempt of an unmanaged trial."""
    view = await service.start_trial(trial_id, resume=body.resume)
    return answer(to_wire(view))


@routes.user.patch("/trials/{trial_id}")
async def patch_trial(trial_id: TrialId, body: PatchTrialRequest, service: TheService) -> Response:
    """A sign of life of an unmanaged trial, and perhaps its new state."""
    state = None if body.state is None else state_in(body.state)
    view = await service.patch_trial(trial_id, state=state, end_time=body.end_time)
    return answer({"trial": shapes.trial(view)})
