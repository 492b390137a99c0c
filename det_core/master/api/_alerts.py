"""Routes by which a trial says what people may want to know (rows 17 and 18 of §4; §5.8)."""

from __future__ import annotations

from fastapi.responses import Response

from det_core.master._errors import Invalid
from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import Body, Id, answer, done

routes = Routes("trials")


class AlertData(Body):
    """What is to be said."""

    title: str = ""
    description: str = ""
    level: str = "LOG_LEVEL_INFO"


class AlertRequest(Body):
    """Something for people's attention."""

    data: AlertData = AlertData()
    experiment_id: Id
    trial_id: Id | None = None


class TrialSource(Body):
    """That a trial uses a checkpoint, and for what."""

    checkpoint_uuid: str
    trial_id: Id
    trial_source_info_type: str = "TRIAL_SOURCE_INFO_TYPE_UNSPECIFIED"


class TrialSourceRequest(Body):
    """That a trial uses a checkpoint."""

    trial_source_info: TrialSource


@routes.trial.post("/webhooks/custom")
async def alert(body: AlertRequest, service: TheService, caller: TheCaller) -> Response:
    """Bring something to people's attention."""
    caller.check(experiment_id=body.experiment_id)
    if body.trial_id is not None:
        caller.check(trial_id=body.trial_id)
    level = body.data.level.removeprefix("LOG_LEVEL_")
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise Invalid(f"body data.level: {body.data.level!r} is none of LOG_LEVEL_DEBUG, _INFO, _WARNING, _ERROR")
    await service.alert(body.experiment_id, body.trial_id, body.data.title, body.data.description, level)
    return done()


@routes.trial.post("/trial-source-info")
async def trial_source_info(body: TrialSourceRequest, service: TheService, caller: TheCaller) -> Response:
    """Note that a trial uses a checkpoint."""
    info = body.trial_source_info
    caller.check(trial_id=info.trial_id)
    await service.trial_source_info(info.trial_id, info.checkpoint_uuid)
    return answer({"trialId": info.trial_id, "checkpointUuid": info.checkpoint_uuid})
