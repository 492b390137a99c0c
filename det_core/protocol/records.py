"""Experiments, trials, validations, checkpoints, metrics, log lines and searches as the master shows them.

One class a thing, for the service that fills it, the wire (``wire.encode``, ``wire.decode``) and the Python client.
Times are seconds since the epoch; states have no prefix; an ID that is None does not exist (yet).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from det_core._json import str_to_nonfinite
from det_core.protocol.wire import decode, encode, on_wire


@dataclass(frozen=True, kw_only=True)
class ExperimentView:
    """An experiment.

    Attributes:
        state: One of §13.2.
        progress: From 0 to 1.
        config: Complete configuration, as trials get it.
        stopping_trials: Number of its trials that are asked to stop and still run.
        stop_by_time: Time at which the last of these is killed.
        warnings: Warnings about its configuration.
        remarks: Warnings about what its trials report.
    """

    id: int
    state: str
    name: str = ""
    description: str = ""
    progress: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    original_config: str = ""
    searcher_type: str = ""
    searcher_metric: str = ""
    smaller_is_better: bool = True
    num_trials: int = 0
    stopping_trials: int = 0
    stop_by_time: float | None = None
    priority: int | None = None
    unmanaged: bool = False
    parent_id: int | None = on_wire("forked_from", default=None)
    external_id: str | None = on_wire("external_experiment_id", default=None)
    start_time: float = 0.0
    end_time: float | None = None
    best_trial_id: int | None = None
    best_metric: float | None = on_wire("best_trial_searcher_metric", decode=str_to_nonfinite, default=None)
    error: str | None = None
    warnings: list[str] = on_wire("config_warnings", default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ValidationView:
    """A validation of a trial.

    Attributes:
        total_batches: Steps completed.
        metrics: All metrics.
        metric: The searched one among them.
    """

    total_batches: int
    metrics: dict[str, Any] = on_wire("metrics.avg_metrics", decode=str_to_nonfinite, default_factory=dict)
    metric: float | None = on_wire("searcher_metric", decode=str_to_nonfinite, default=None)
    end_time: float | None = None
    trial_run_id: int = 0


def _decode_validation(value: Any) -> ValidationView:
    return decode(ValidationView, value)


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """A trial.

    Attributes:
        state: One of §13.2; of an ACTIVE trial QUEUED, PULLING, STARTING or RUNNING, and ACTIVE if it is parked.
        status: Activity that its script has set.
        restarts: Number of its failures, one too many included.
        restarted: Number of starts after a failure.
        stop_by_time: Time at which it is killed if it still runs; it was asked to stop.
        parked: Whether it waits for the search.
        total_batches: Steps completed.
        exit_status: Exit status of its last run, as of a shell; None in lists, and where it is not known.
    """

    id: int
    experiment_id: int
    state: str
    request_id: str = ""
    task_id: str = ""
    external_id: str | None = on_wire("external_trial_id", default=None)
    status: str = on_wire("runner_state", default="")
    hparams: dict[str, Any] = field(default_factory=dict)
    seed: int = on_wire("trial_seed", default=0)
    restarts: int = 0
    restarted: int | None = None  # other masters send restarts alone
    trial_run_id: int = 0
    allocation_id: str | None = None
    stop_by_time: float | None = None
    parked: bool = False
    progress: float = 0.0
    total_batches: int = on_wire("total_batches_processed", default=0)
    operation_length: int | None = None
    operation_completed: bool = False
    latest_checkpoint: str | None = on_wire("latest_checkpoint_uuid", default=None)
    latest_validation: ValidationView | None = on_wire(encode=encode, decode=_decode_validation, default=None)
    best_validation: ValidationView | None = on_wire(encode=encode, decode=_decode_validation, default=None)
    summary_metrics: dict[str, Any] = field(default_factory=dict)
    start_time: float = 0.0
    end_time: float | None = None
    error: str | None = None
    exit_status: int | None = None


def _encode_sizes(sizes: dict[str, int]) -> dict[str, str]:
    return {path: str(size) for path, size in sizes.items()}


def _decode_sizes(sizes: dict[str, str]) -> dict[str, int]:
    return {path: int(size) for path, size in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class CheckpointView:
    """A checkpoint, with the trial that saved it (§5.7).

    Attributes:
        state: COMPLETED, PARTIALLY_DELETED, …
        resources: Path to size in bytes.
        searcher_metric: Value of the searched metric at its step.
        training_metrics: Metrics of the trial at its step.
    """

    uuid: str
    state: str
    task_id: str = ""
    allocation_id: str | None = None
    storage_id: int | None = None
    storage: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, int] = on_wire(encode=_encode_sizes, decode=_decode_sizes, default_factory=dict)
    size: int = 0
    steps_completed: int = 0
    report_time: float = 0.0
    trial_id: int = on_wire("training.trial_id", default=0)
    experiment_id: int = on_wire("training.experiment_id", default=0)
    experiment_config: dict[str, Any] = on_wire("training.experiment_config", default_factory=dict)
    hparams: dict[str, Any] = on_wire("training.hparams", default_factory=dict)
    searcher_metric: float | None = on_wire("training.searcher_metric", decode=str_to_nonfinite, default=None)
    training_metrics: dict[str, Any] = on_wire(
        "training.training_metrics.avg_metrics", decode=str_to_nonfinite, default_factory=dict
    )
    validation_metrics: dict[str, Any] = on_wire(
        "training.validation_metrics.avg_metrics", decode=str_to_nonfinite, default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class MetricView:
    """Metrics of a trial at one step, merged as §5.2 says.

    Attributes:
        total_batches: Steps completed.
        archived: Whether a later run has replaced it.
    """

    # Counts the rows of an answer, which may be more than a double can count.
    id: int = on_wire(encode=str, decode=int)
    trial_id: int
    trial_run_id: int = 0
    group: str = ""
    total_batches: int | None = None
    metrics: dict[str, Any] = on_wire("metrics.avg_metrics", decode=str_to_nonfinite, default_factory=dict)
    batch_metrics: list[dict[str, Any]] | None = on_wire("metrics.batch_metrics", decode=str_to_nonfinite, default=None)
    end_time: float | None = None
    archived: bool = False


def _encode_level(level: str) -> str:
    return "LOG_LEVEL_" + level.removeprefix("LOG_LEVEL_")


@dataclass(frozen=True, kw_only=True)
class LogView:
    """A line of a task's log; ``log`` ends in a newline."""

    id: str
    task_id: str
    timestamp: float
    trial_id: int | None = None
    allocation_id: str | None = None
    rank: int | None = on_wire("rank_id", default=None)
    level: str = on_wire(encode=_encode_level, decode=lambda level: level.removeprefix("LOG_LEVEL_"), default="INFO")
    stdtype: str = ""
    source: str = ""
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchView:
    """State of a search.

    Attributes:
        rungs: Brackets and rungs, for people; a user's method may have others, or none.
        events: Number of recorded events.
    """

    experiment_id: int
    searcher: dict[str, Any]
    progress: float
    rungs: Any
    events: int
    trials_requested: int
    trials_closed: int


@dataclass(frozen=True, kw_only=True)
class StartView:
    """Start of an unmanaged trial: its run, and what it resumes from."""

    trial_run_id: int
    steps_completed: int
    latest_checkpoint: str | None = None
