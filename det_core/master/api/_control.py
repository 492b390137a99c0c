"""Routes that steer experiments and trials, and wait for them (§10)."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from fastapi.responses import Response

from det_core.master.api import _shapes as shapes
from det_core.master.api._pending import LONGEST_WAIT
from det_core.master.api._routing import Routes, ThePendingRequests, TheService
from det_core.master.api._types import ExperimentId, TrialId, answer, done
from det_core.protocol.wire import to_wire

routes = Routes("control")


@routes.user.post("/experiments/{experiment_id}/activate")
async def activate(experiment_id: ExperimentId, service: TheService) -> Response:
    """Let a paused experiment go on."""
    await service.activate(experiment_id)
    return done()


@routes.user.post("/experiments/{experiment_id}/pause")
async def pause(experiment_id: ExperimentId, service: TheService) -> Response:
    """Have all trials save and stop, to go on when it is activated."""
    await service.pause(experiment_id)
    return done()


@routes.user.post("/experiments/{experiment_id}/cancel")
async def cancel(experiment_id: ExperimentId, service: TheService) -> Response:
    """Have all trials save and stop, for good."""
    await service.cancel(experiment_id)
    return done()


@routes.user.post("/experiments/{experiment_id}/kill")
async def kill(experiment_id: ExperimentId, service: TheService) -> Response:
    """Kill all trials, for good."""
    await service.kill(experiment_id)
    return done()


@routes.user.post("/experiments/{experiment_id}/archive")
async def archive(experiment_id: ExperimentId, service: TheService) -> Response:
    """Put an experiment that has ended aside."""
    await service.archive(experiment_id)
    return done()


@routes.user.post("/experiments/{experiment_id}/unarchive")
async def unarchive(experiment_id: ExperimentId, service: TheService) -> Response:
    """Bring an experiment back that was put aside."""
    await service.unarchive(experiment_id)
    return done()


@routes.user.delete("/experiments/{experiment_id}")
async def delete_experiment(experiment_id: ExperimentId, service: TheService) -> Response:
    """Delete an experiment that has ended, with its checkpoints. They go in the background."""
    await service.delete_experiment(experiment_id)
    return done()


@routes.user.post("/trials/{trial_id}/kill")
async def kill_trial(trial_id: TrialId, service: TheService) -> Response:
    """Kill one trial, for good."""
    await service.kill_trial(trial_id)
    return done()


@routes.trial.get("/experiments/{experiment_id}/wait")
async def wait_experiment(
    experiment_id: ExperimentId,
    service: TheService,
    pending: ThePendingRequests,
    timeout_seconds: Annotated[float, Query(ge=0)] = LONGEST_WAIT,
) -> Response:
    """The experiment once it has ended, or as it is after that time (at most a minute)."""
    work = service.wait_experiment(experiment_id, min(timeout_seconds, LONGEST_WAIT))
    view = await pending.wait(work)
    return answer(shapes.experiment_reply(view))


@routes.trial.get("/experiments/{experiment_id}/search")
async def search(experiment_id: ExperimentId, service: TheService) -> Response:
    """Where the search stands: rungs, and how much has been decided."""
    return answer({"search": to_wire(await service.search_state(experiment_id))})


@routes.trial.get("/experiments/{experiment_id}/best_trial")
async def best_trial(experiment_id: ExperimentId, service: TheService) -> Response:
    """The trial with the best searched metric."""
    view = await service.best_trial(experiment_id)
    return answer({} if view is None else {"trial": shapes.trial(view)})


@routes.trial.get("/experiments/{experiment_id}/best_checkpoint")
async def best_checkpoint(experiment_id: ExperimentId, service: TheService) -> Response:
    """Of the checkpoints still there, that with the best searched metric at its step."""
    view = await service.best_checkpoint(experiment_id)
    return answer({} if view is None else {"checkpoint": shapes.checkpoint(view)})
