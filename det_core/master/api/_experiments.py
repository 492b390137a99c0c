"""Routes of experiments: create, read, wait for, steer, change, continue and delete (rows 6, 8 and 32 of §4; §10).

A context directory travels file by file, or packed.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.convertors import Convertor, register_url_convertor

from det_core.master._errors import Invalid
from det_core.master.api import _shapes as shapes
from det_core.master.api._routing import LONGEST_WAIT, Routes, ThePendingRequests, TheService, end_of_route
from det_core.master.api._types import (
    Body,
    ExperimentId,
    Id,
    Int64,
    Limit,
    Offset,
    Timestamp,
    answer,
    answer_archive,
    answer_page,
    done,
    rows_of_page,
    state_in,
)
from det_core.master.engines import check_archive, pack_files
from det_core.master.service import _checkpoints, _continue, _create, _queries, _retention, _steering
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.master.service._create import CreatedView

routes = Routes("experiments")
BASE64_PART = 4 << 18
"""Characters of base64 that are decoded at a time; a multiple of 4."""


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


class FileEntry(Body):
    """One file (``type`` 48), folder (53) or link (50); ``content`` in base64, ``mode`` as of chmod."""

    path: str
    type: Int64 = 48
    content: str = ""
    mtime: Int64 = 0
    mode: Int64 = 0o644


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


class ContinueRequest(Body):
    """The experiment to go on with, and configuration text to lay over its own."""

    id: Id
    override_config: str = ""


class Resources(Body):
    """Part of ``resources`` that can be changed later."""

    priority: Annotated[int, Field(ge=1, le=99)] | None = None


class KeptCheckpoints(Body):
    """Numbers of checkpoints that stay when the experiment has ended."""

    save_experiment_best: Annotated[int, Field(ge=0)] | None = None
    save_trial_best: Annotated[int, Field(ge=0)] | None = None
    save_trial_latest: Annotated[int, Field(ge=0)] | None = None


class PatchExperimentRequest(Body):
    """Changes of an experiment."""

    name: str | None = None
    description: str | None = None
    resources: Resources = Resources()
    checkpoint_storage: KeptCheckpoints | None = None


@routes.user.post("/experiments")
async def create_experiment(body: CreateExperimentRequest, service: TheService) -> Response:
    """Create an experiment, and start it unless ``activate`` is false."""
    if body.template:
        raise Invalid(
            f"template: {body.template!r} cannot be used, this master has no templates; put it into the config"
        )
    context = await asyncio.to_thread(_packed, body.model_definition, body.b64_tgz)
    created = await _create.create_experiment(
        service,
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
    """Answer the experiment with this external ID, created if there is none."""
    created = await _create.put_experiment(
        service, external_id, body.config, unmanaged=body.unmanaged, start_time=body.start_time
    )
    return answer(_created_reply(created))


@routes.user.get("/experiments")
async def list_experiments(
    service: TheService,
    states: Annotated[list[str], Query()] = [],  # noqa: B006
    name: str | None = None,
    order_by: Annotated[str, Query(pattern="^(ORDER_BY_)?(ASC|DESC)$")] = "ORDER_BY_ASC",
    sort_by: Annotated[str, Query(description="SORT_BY_START_TIME, or else by number")] = "SORT_BY_ID",
    offset: Offset = 0,
    limit: Limit = 0,
) -> Response:
    """Answer experiments by number, or by when they started, in pages; each filter that is given must match."""
    views, total = await _queries.find_experiments(
        service,
        states=[state_in(s) for s in states],
        name=name,
        newest_first=order_by.endswith("DESC"),
        by_start=sort_by.removeprefix("SORT_BY_") == "START_TIME",
        limit=rows_of_page(limit),
        offset=offset,
    )
    return await answer_page("experiments", shapes.experiment, views, total, offset=offset, limit=limit)


@routes.trial.get("/experiments/{experiment_id}")
async def get_experiment(experiment_id: ExperimentId, service: TheService) -> Response:
    """Answer one experiment."""
    view = await _queries.experiment(service, experiment_id)
    return answer(shapes.experiment_reply(view))


@routes.trial.get("/experiments/{experiment_id}/trials")
async def list_trials(
    experiment_id: ExperimentId,
    service: TheService,
    states: Annotated[list[str], Query()] = [],  # noqa: B006
    sort_by: Annotated[str, Query(description="SORT_BY_BEST_VALIDATION_METRIC, or else by number")] = "SORT_BY_ID",
    offset: Offset = 0,
    limit: Limit = 0,
) -> Response:
    """Answer the trials of an experiment that are in one of ``states``, by number or the best first, in pages."""
    views, total = await _queries.find_trials(
        service,
        experiment_id,
        states=[state_in(s) for s in states],
        best_first=sort_by.removeprefix("SORT_BY_") == "BEST_VALIDATION_METRIC",
        limit=rows_of_page(limit),
        offset=offset,
    )
    return await answer_page("trials", shapes.trial, views, total, offset=offset, limit=limit)


@routes.trial.get("/experiments/{experiment_id}/searcher/best_searcher_validation_metric")
async def best_metric(experiment_id: ExperimentId, service: TheService) -> Response:
    """Answer the best value of the searched metric; 404 as long as there is none."""
    return answer({"metric": await _queries.best_validation(service, experiment_id)})


@routes.trial.get("/experiments/{experiment_id}/model_def")
async def model_def(experiment_id: ExperimentId, service: TheService) -> Response:
    """Answer the context directory of an experiment."""
    return answer_archive(await _queries.context(service, experiment_id))


@routes.trial.get("/tasks/{task_id}/context_directory")
async def context_directory(task_id: str, service: TheService) -> Response:
    """Answer the context directory of a task."""
    return answer_archive(await _queries.task_context(service, task_id))


@routes.user.post("/experiments/continue")
async def continue_experiment(body: ContinueRequest, service: TheService) -> Response:
    """Go on with an experiment that has ended: incomplete trials resume from their latest checkpoints."""
    view = await _continue.continue_experiment(service, body.id, body.override_config or None)
    return answer(shapes.experiment_reply(view))


@routes.user.patch("/experiments/{experiment_id}")
async def patch_experiment(experiment_id: ExperimentId, body: PatchExperimentRequest, service: TheService) -> Response:
    """Change name, description, priority, or how many checkpoints are kept."""
    kept = body.checkpoint_storage
    view = await _steering.patch_experiment(
        service,
        experiment_id,
        name=body.name,
        description=body.description,
        priority=body.resources.priority,
        checkpoint_storage=None if kept is None else kept.model_dump(exclude_none=True),
    )
    return answer(shapes.experiment_reply(view))


@routes.user.post("/experiments/{experiment_id}/activate")
@routes.user.post("/experiments/{experiment_id}/pause")
@routes.user.post("/experiments/{experiment_id}/cancel")
@routes.user.post("/experiments/{experiment_id}/kill")
async def steer(experiment_id: ExperimentId, request: Request, service: TheService) -> Response:
    """Carry out the action that ends the path."""
    await ACTIONS[end_of_route(request)](service, experiment_id)
    return done()


ACTIONS = {
    "activate": _steering.activate,
    "pause": _steering.pause,
    "cancel": _steering.cancel,
    "kill": _steering.kill,
}


@routes.user.delete("/experiments/{experiment_id}")
async def delete_experiment(experiment_id: ExperimentId, service: TheService) -> Response:
    """Delete an experiment that has ended, with its checkpoints. They go in the background."""
    await _retention.delete_experiment(service, experiment_id)
    return done()


@routes.trial.get("/experiments/{experiment_id}/wait")
async def wait_experiment(
    experiment_id: ExperimentId,
    service: TheService,
    pending: ThePendingRequests,
    timeout_seconds: Annotated[float, Query(ge=0)] = LONGEST_WAIT,
) -> Response:
    """Answer the experiment once it has ended, or after the timeout (at most a minute)."""
    work = _queries.wait(service, experiment_id, min(timeout_seconds, LONGEST_WAIT))
    view = await pending.wait(work)
    return answer(shapes.experiment_reply(view))


@routes.trial.get("/experiments/{experiment_id}/search")
async def search(experiment_id: ExperimentId, service: TheService) -> Response:
    """Answer the state of the search: rungs, and how much has been decided."""
    return answer({"search": encode(await _queries.search(service, experiment_id))})


@routes.trial.get("/experiments/{experiment_id}/best_trial")
async def best_trial(experiment_id: ExperimentId, service: TheService) -> Response:
    """Answer the trial with the best searched metric."""
    view = await _queries.best_trial(service, experiment_id)
    return answer({} if view is None else {"trial": shapes.trial(view)})


@routes.trial.get("/experiments/{experiment_id}/best_checkpoint")
async def best_checkpoint(experiment_id: ExperimentId, service: TheService) -> Response:
    """Answer the checkpoint with the best searched metric at its step, of those that are not deleted."""
    view = await _checkpoints.best(service, experiment_id)
    return answer({} if view is None else {"checkpoint": encode(view)})


def _packed(files: Sequence[FileEntry], b64_tgz: str | None) -> bytes | None:
    """Return the context directory as a checked archive, or None without one. Slow if it is large.

    Raises:
        Invalid: If it came in both forms, or contains something that is not allowed.
        TooMuch: If it is too large, packed or unpacked.
    """
    if b64_tgz and files:
        raise Invalid("the context directory comes either as modelDefinition or as b64Tgz, not as both")
    if not b64_tgz:
        return pack_files([file.model_dump() for file in files]) if files else None
    archive = _decode(b64_tgz)
    check_archive(io.BytesIO(archive))
    return archive


def _decode(text: str) -> bytes:
    """Return what a text in base64 stands for, in parts: decoding holds the lock of the interpreter."""
    archive = bytearray()
    try:
        if "=" in text[:-2]:
            raise ValueError("padding before its end")
        for start in range(0, len(text), BASE64_PART):
            archive += base64.b64decode(text[start : start + BASE64_PART], validate=True)
    except ValueError as e:
        raise Invalid(f"body b64Tgz: no base64: {e}") from None
    return bytes(archive)


def _created_reply(created: CreatedView) -> dict[str, Any]:
    # ``warnings`` are the contract's codes, of which there are none; ``configWarnings`` are lines for people.
    return {**shapes.experiment_reply(created["experiment"]), "warnings": [], "configWarnings": created["warnings"]}
