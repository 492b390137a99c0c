"""An experiment as clients see it (§4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from det_core.master.api._types import Pagination, Reply, TimeOut, state_out

if TYPE_CHECKING:
    from det_core.master.service._views import ExperimentView

USER = "determined"
"""The name of the one user; the contract's clients want one."""


class Experiment(Reply):
    """An experiment. ``original_config`` is the text that was submitted, ``config`` the complete configuration.

    ``stopping_trials``: how many of its trials were told to stop and still run, at most until ``stop_by_time``.
    ``remarks``: what people should know of what its trials report.
    """

    id: int
    job_id: str
    name: str
    description: str
    labels: list[str]
    state: str
    progress: float
    config: dict[str, Any]
    original_config: str
    searcher_type: str
    searcher_metric: str
    smaller_is_better: bool
    num_trials: int
    stopping_trials: int
    stop_by_time: TimeOut | None = None
    priority: int
    archived: bool
    unmanaged: bool
    start_time: TimeOut
    end_time: TimeOut | None = None
    forked_from: int | None = None
    external_experiment_id: str | None = None
    best_trial_id: int | None = None
    best_trial_searcher_metric: float | None = None
    error: str | None = None
    config_warnings: list[str]
    remarks: list[str]
    username: str = USER
    display_name: str = USER
    user_id: int = 1
    project_id: int = 1
    project_owner_id: int = 1
    workspace_id: int = 1

    @classmethod
    def of(cls, view: ExperimentView) -> Experiment:
        """As the service tells it."""
        return cls(
            id=view["id"],
            job_id=f"experiment-{view['id']}",
            name=view["name"],
            description=view["description"],
            labels=view["labels"],
            state=state_out(view["state"]),
            progress=view["progress"],
            config=view["config"],
            original_config=view["original_config"],
            searcher_type=view["searcher_type"],
            searcher_metric=view["searcher_metric"],
            smaller_is_better=view["smaller_is_better"],
            num_trials=view["num_trials"],
            stopping_trials=view["stopping_trials"],
            stop_by_time=view["stop_by_time"],
            priority=view["priority"],
            archived=view["archived"],
            unmanaged=view["unmanaged"],
            start_time=view["start_time"],
            end_time=view["end_time"],
            forked_from=view["parent_id"],
            external_experiment_id=view["external_id"],
            best_trial_id=view["best_trial_id"],
            best_trial_searcher_metric=view["best_metric"],
            error=view["error"],
            config_warnings=view["warnings"],
            remarks=view["remarks"],
        )


class ExperimentReply(Reply):
    """One experiment."""

    experiment: Experiment
    config: dict[str, Any]


class ExperimentsReply(Reply):
    """Some experiments."""

    experiments: list[Experiment]
    pagination: Pagination


class CreateExperimentReply(Reply):
    """The new experiment. ``config_warnings`` are lines for people; ``warnings``, the contract's, is empty."""

    experiment: Experiment
    config: dict[str, Any]
    warnings: list[str] = Field(default_factory=list)
    config_warnings: list[str] = Field(default_factory=list)
