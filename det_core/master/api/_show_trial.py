"""A trial, its metrics and its search as clients see them (§4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from det_core.master.api._types import Int64Out, Pagination, Reply, TimeOut, state_out

if TYPE_CHECKING:
    from det_core.master.service._views import MetricView, SearchView, TrialView, ValidationView


class Metrics(Reply):
    """What one report said."""

    avg_metrics: dict[str, Any]
    batch_metrics: list[dict[str, Any]] | None = None


class Validation(Reply):
    """One validation; ``searcher_metric`` is the searched one of its metrics."""

    total_batches: int
    metrics: Metrics
    searcher_metric: float | None = None
    end_time: TimeOut
    trial_run_id: int
    num_inputs: int = 0

    @classmethod
    def of(cls, view: ValidationView | None) -> Validation | None:
        """As the service tells it."""
        if view is None:
            return None
        return cls(
            total_batches=view["total_batches"],
            metrics=Metrics(avg_metrics=view["metrics"]),
            searcher_metric=view["metric"],
            end_time=view["end_time"],
            trial_run_id=view["trial_run_id"],
        )


class Trial(Reply):
    """A trial. ``runner_state`` is what it last said it does; ``operation_length`` how far it is to train.

    ``restarts`` counts failures; ``restarted`` how often it was started again after one. ``stop_by_time``: it was told
    to stop, still runs, and is killed then.
    """

    id: int
    experiment_id: int
    request_id: str
    task_id: str
    external_trial_id: str | None = None
    state: str
    runner_state: str
    hparams: dict[str, Any]
    trial_seed: int
    restarts: int
    restarted: int
    trial_run_id: int
    allocation_id: str | None = None
    stop_by_time: TimeOut | None = None
    parked: bool
    progress: float
    total_batches_processed: int
    operation_length: Int64Out | None = None
    operation_completed: bool
    latest_checkpoint_uuid: str | None = None
    latest_validation: Validation | None = None
    best_validation: Validation | None = None
    summary_metrics: dict[str, Any]
    start_time: TimeOut
    end_time: TimeOut | None = None
    error: str | None = None
    exit_status: int | None = None

    @classmethod
    def of(cls, view: TrialView) -> Trial:
        """As the service tells it."""
        return cls(
            id=view["id"],
            experiment_id=view["experiment_id"],
            request_id=view["request_id"],
            task_id=view["task_id"],
            external_trial_id=view["external_id"],
            state=state_out(view["state"]),
            runner_state=view["status"],
            hparams=view["hparams"],
            trial_seed=view["seed"],
            restarts=view["restarts"],
            restarted=view["restarted"],
            trial_run_id=view["trial_run_id"],
            allocation_id=view["allocation_id"],
            stop_by_time=view["stop_by_time"],
            parked=view["parked"],
            progress=view["progress"],
            total_batches_processed=view["total_batches"],
            operation_length=view["operation_length"],
            operation_completed=view["operation_completed"],
            latest_checkpoint_uuid=view["latest_checkpoint"],
            latest_validation=Validation.of(view["latest_validation"]),
            best_validation=Validation.of(view["best_validation"]),
            summary_metrics=view["summary_metrics"],
            start_time=view["start_time"],
            end_time=view["end_time"],
            error=view["error"],
            exit_status=view["exit_status"],
        )


class TrialReply(Reply):
    """One trial."""

    trial: Trial


class BestTrialReply(Reply):
    """The best trial; absent as long as none has a validation."""

    trial: Trial | None = None


class TrialsReply(Reply):
    """The trials of an experiment."""

    trials: list[Trial]
    pagination: Pagination


class MetricRow(Reply):
    """What a trial reported for one step of one group. ``archived``: a later run has taken its place."""

    id: Int64Out
    trial_id: int
    trial_run_id: int
    group: str
    total_batches: int | None = None
    metrics: Metrics
    end_time: TimeOut
    archived: bool

    @classmethod
    def of(cls, view: MetricView) -> MetricRow:
        """As the service tells it."""
        return cls(
            id=view["id"],
            trial_id=view["trial_id"],
            trial_run_id=view["trial_run_id"],
            group=view["group"],
            total_batches=view["total_batches"],
            metrics=Metrics(avg_metrics=view["metrics"], batch_metrics=view["batch_metrics"]),
            end_time=view["end_time"],
            archived=view["archived"],
        )


class MetricRows(Reply):
    """Some rows."""

    metrics: list[MetricRow]


class MetricsLine(Reply):
    """One line of a stream of metrics."""

    result: MetricRows


class Search(Reply):
    """Where a search stands. ``rungs`` looks as the search likes; ``events`` is how many were recorded."""

    experiment_id: int
    searcher: dict[str, Any]
    progress: float
    rungs: Any = None
    events: int
    trials_requested: int
    trials_closed: int

    @classmethod
    def of(cls, view: SearchView) -> Search:
        """As the service tells it."""
        return cls(**view)


class SearchReply(Reply):
    """Where a search stands."""

    search: Search
