"""Routes that change experiments, or go on with them (§10)."""

from __future__ import annotations

from typing import Annotated

from fastapi.responses import Response
from pydantic import Field

from det_core.master.api import _shapes as shapes
from det_core.master.api._routing import Routes, TheService
from det_core.master.api._types import Body, ExperimentId, Id, answer

routes = Routes("experiments")


class ContinueRequest(Body):
    """The experiment to go on with, and configuration text to lay over its own."""

    id: Id
    override_config: str = ""


class Resources(Body):
    """What of ``resources`` can be changed later."""

    priority: Annotated[int, Field(ge=1, le=99)] | None = None


class KeptCheckpoints(Body):
    """How many checkpoints stay when the experiment has ended."""

    save_experiment_best: Annotated[int, Field(ge=0)] | None = None
    save_trial_best: Annotated[int, Field(ge=0)] | None = None
    save_trial_latest: Annotated[int, Field(ge=0)] | None = None


class PatchExperimentRequest(Body):
    """What is to change."""

    name: str | None = None
    description: str | None = None
    labels: list[str] | None = None
    resources: Resources = Resources()
    checkpoint_storage: KeptCheckpoints | None = None


@routes.user.post("/experiments/continue")
async def continue_experiment(body: ContinueRequest, service: TheService) -> Response:
    """Go on with an experiment that has ended: incomplete trials resume from their latest checkpoints."""
    view = await service.continue_experiment(body.id, body.override_config or None)
    return answer(shapes.experiment_reply(view))


@routes.user.patch("/experiments/{experiment_id}")
async def patch_experiment(experiment_id: ExperimentId, body: PatchExperimentRequest, service: TheService) -> Response:
    """Change name, description, labels, priority, or how many checkpoints are kept."""
    kept = body.checkpoint_storage
    view = await service.patch_experiment(
        experiment_id,
        name=body.name,
        description=body.description,
        labels=body.labels,
        priority=body.resources.priority,
        checkpoint_storage=None if kept is None else kept.model_dump(exclude_none=True),
    )
    return answer(shapes.experiment_reply(view))
