"""Shapes of answers: the service's views as the wire contract's clients expect them (section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.protocol.records import ExperimentView, TrialView

USER = "determined"
"""Name of the one user, which the contract's clients expect."""
_SAME_FOR_ALL = {
    "archived": False,
    "username": USER,
    "displayName": USER,
    "userId": 1,
    "projectId": 1,
    "projectOwnerId": 1,
    "workspaceId": 1,
}


def experiment(view: ExperimentView) -> dict[str, Any]:
    """Return an experiment."""
    return {**encode(view), **_SAME_FOR_ALL, "jobId": f"experiment-{view.id}"}


def experiment_reply(view: ExperimentView) -> dict[str, Any]:
    """Return the answer with one experiment and its configuration."""
    return {"experiment": experiment(view), "config": view.config}


def trial(view: TrialView) -> dict[str, Any]:
    """Return a trial."""
    shape = encode(view)
    for validation in ("latestValidation", "bestValidation"):
        if validation in shape:
            shape[validation]["numInputs"] = 0
    return shape
