"""Routes that create, read and change experiments (rows 6, 8 and 32 of §4; §10)."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query
from fastapi.responses import Response
from pydantic import Field
from starlette.convertors import Convertor, register_url_convertor

from det_core.master._errors import Invalid
from det_core.master.api import _shapes as shapes
from det_core.master.api._archive import FileEntry, packed
from det_core.master.api._routing import Routes, TheService
from det_core.master.api._types import Body, ExperimentId, Id, Timestamp, answer, state_in

if TYPE_CHECKING:
    from det_core.master.service._views import CreatedView

routes = Routes("experiments")


class _Anything(Convertor[str]):
    """The rest of a path, whatever is in it: ``path`` ends at a line feed."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        """As it is."""
        return value

    def to_string(self, value: str) -> str:
        """As it is."""
        return value


register_url_convertor("anything", _Anything())


class CreateExperimentRequest(Body):
    """A new experiment.

    ``config`` is YAML or JSON text, or an object. The context directory comes as ``model_definition``, file by file, or
    packed (tar, gzip, base64) as ``b64_tgz``.
    """

    config: str | dict[str, Any]
    overrides: list[str] = Field(default_factory=list)
    model_definition: list[FileEntry] = Field(default_factory=list)
    b64_tgz: str | None = None
    activate: bool = True
    validate_only: bool = False
    unmanaged: bool = False
    parent_id: Id | None = None
    template: str | None = None


class PutExperimentRequest(CreateExperimentRequest):
    """As for a new experiment, without a context directory: the master does not run its trials.

    ``start_time``: when it began, if that was before.
    """

    unmanaged: bool = True
    start_time: Timestamp | None = None


@routes.user.post("/experiments")
async def create_experiment(body: CreateExperimentRequest, service: TheService) -> Response:
    """Create an experiment, and start it unless ``activate`` is false."""
    if body.template:
        raise Invalid(
            f"template: {body.template!r} cannot be used, this master has no templates; put it into the config"
        )
    context = await asyncio.to_thread(packed, body.model_definition, body.b64_tgz)
    created = await service.create_experiment(
        body.config,
        context,
        activate=body.activate,
        validate_only=body.validate_only,
        unmanaged=body.unmanaged,
        parent_id=body.parent_id,
        overrides=body.overrides,
    )
    return answer(_created_reply(created))


@routes.user.put("/experiments/by-external-id/{external_id:anything}")
async def put_experiment(external_id: str, body: PutExperimentRequest, service: TheService) -> Response:
    """The experiment of that external id, created if there is none."""
    created = await service.put_experiment(
        external_id, body.config, unmanaged=body.unmanaged, start_time=body.start_time
    )
    return answer(_created_reply(created))


@routes.user.get("/experiments")
async def list_experiments(
    service: TheService,
    states: Annotated[list[str], Query()] = [],  # noqa: B006
    labels: Annotated[list[str], Query()] = [],  # noqa: B006
    name: str | None = None,
    archived: bool | None = None,
    order_by: Annotated[str, Query(pattern="^(ORDER_BY_)?(ASC|DESC)$")] = "ORDER_BY_ASC",
    sort_by: Annotated[str, Query(description="SORT_BY_START_TIME, or else by number")] = "SORT_BY_ID",
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    limit: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    """Experiments by their numbers, or by when they started; each filter that is given must match. ``limit`` 0: all."""
    views = await service.experiments(
        states=[state_in(s) for s in states],
        labels=labels,
        name=name,
        archived=archived,
        newest_first=order_by.endswith("DESC"),
        by_start=sort_by.removeprefix("SORT_BY_") == "START_TIME",
        limit=limit or None,
        offset=offset,
    )
    page = {"offset": offset, "limit": limit}
    return answer({"experiments": [shapes.experiment(view) for view in views], "pagination": page})


@routes.trial.get("/experiments/{experiment_id}")
async def get_experiment(experiment_id: ExperimentId, service: TheService) -> Response:
    """One experiment."""
    view = await service.experiment(experiment_id)
    return answer(shapes.experiment_reply(view))


@routes.trial.get("/experiments/{experiment_id}/trials")
async def list_trials(
    experiment_id: ExperimentId,
    service: TheService,
    states: Annotated[list[str], Query()] = [],  # noqa: B006
    sort_by: Annotated[str, Query(description="SORT_BY_BEST_VALIDATION_METRIC, or else by number")] = "SORT_BY_ID",
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    limit: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    """The trials of an experiment that are in one of ``states``, by number or the best first. ``limit`` 0: all."""
    views, total = await service.page_of_trials(
        experiment_id,
        states=[state_in(s) for s in states],
        best_first=sort_by.removeprefix("SORT_BY_") == "BEST_VALIDATION_METRIC",
        limit=limit or None,
        offset=offset,
    )
    # The contract's clients read pages until endIndex reaches total.
    page = {
        "offset": offset,
        "limit": limit,
        "startIndex": min(offset, total),
        "endIndex": offset + len(views),
        "total": total,
    }
    return answer({"trials": [shapes.trial(view) for view in views], "pagination": page})


@routes.trial.get("/experiments/{experiment_id}/searcher/best_searcher_validation_metric")
async def best_metric(experiment_id: ExperimentId, service: TheService) -> Response:
    """The best value of the searched metric; 404 as long as there is none."""
    return answer({"metric": await service.best_validation(experiment_id)})


@routes.trial.get("/experiments/{experiment_id}/model_def")
async def model_def(experiment_id: ExperimentId, service: TheService) -> Response:
    """The context directory of an experiment."""
    archive = await service.context_archive(experiment_id)
    return answer({"b64Tgz": base64.b64encode(archive).decode()})


def _created_reply(created: CreatedView) -> dict[str, Any]:
    # ``warnings`` are the contract's codes, of which there are none; ``configWarnings`` are lines for people.
    return {**shapes.experiment_reply(created["experiment"]), "warnings": [], "configWarnings": created["warnings"]}
