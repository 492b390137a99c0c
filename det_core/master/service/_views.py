"""What the service answers: plain dictionaries with snake_case keys, times in seconds since the epoch.

States stand without the prefix ``STATE_``. An id that is None does not exist (yet).
"""

from __future__ import annotations

from typing import Any, TypedDict


class ExperimentView(TypedDict):
    """An experiment. ``state`` is one of §13.2; ``progress`` from 0 to 1; ``config`` complete, as trials get it.

    ``stopping_trials``: how many of its trials were told to stop, and still run, the last of them at most until
    ``stop_by_time``. ``remarks``: what people should know of what its trials report.
    """

    id: int
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
    stop_by_time: float | None
    priority: int
    archived: bool
    unmanaged: bool
    parent_id: int | None
    external_id: str | None
    start_time: float
    end_time: float | None
    best_trial_id: int | None
    best_metric: float | None
    error: str | None
    warnings: list[str]
    remarks: list[str]


class ValidationView(TypedDict):
    """One validation of a trial: its metrics at a step, and the searched one among them."""

    total_batches: int
    metrics: dict[str, Any]
    metric: float | None
    end_time: float
    trial_run_id: int


class TrialView(TypedDict):
    """A trial. ``state``: §13.2; an ACTIVE one says QUEUED, PULLING, STARTING or RUNNING, a parked one ACTIVE.

    ``restarts`` counts failures, also the one that was one too many; ``restarted`` how often it was started again after
    one. ``stop_by_time``: it was told to stop, still runs, and is killed then. ``exit_status``: how the last run ended,
    as a shell tells it; None in lists, and where it is not known.
    """

    id: int
    experiment_id: int
    request_id: str
    task_id: str
    external_id: str | None
    state: str
    status: str
    hparams: dict[str, Any]
    seed: int
    restarts: int
    restarted: int
    trial_run_id: int
    allocation_id: str | None
    stop_by_time: float | None
    parked: bool
    progress: float
    total_batches: int
    operation_length: int | None
    operation_completed: bool
    latest_checkpoint: str | None
    latest_validation: ValidationView | None
    best_validation: ValidationView | None
    summary_metrics: dict[str, Any]
    start_time: float
    end_time: float | None
    error: str | None
    exit_status: int | None


class CheckpointView(TypedDict):
    """A checkpoint, with what is known of the trial that made it (§5.7). ``state``: COMPLETED, PARTIALLY_DELETED, …"""

    uuid: str
    task_id: str
    allocation_id: str | None
    storage_id: int | None
    storage: dict[str, Any] | None
    state: str
    metadata: dict[str, Any]
    resources: dict[str, int]
    size: int
    steps_completed: int
    report_time: float
    trial_id: int
    experiment_id: int
    experiment_config: dict[str, Any]
    hparams: dict[str, Any]
    searcher_metric: float | None
    training_metrics: dict[str, Any]
    validation_metrics: dict[str, Any]


class MetricView(TypedDict):
    """One row of a trial's metrics, merged as §5.2 says. ``archived``: a later run took its place."""

    id: int
    trial_id: int
    trial_run_id: int
    group: str
    total_batches: int | None
    metrics: dict[str, Any]
    batch_metrics: list[dict[str, Any]] | None
    end_time: float
    archived: bool


class LogView(TypedDict):
    """One line of a task's log. ``id`` grows by each line of all tasks; ``log`` ends in a newline."""

    id: int
    task_id: str
    allocation_id: str | None
    rank: int | None
    timestamp: float
    level: str
    stdtype: str
    source: str
    log: str


class OperationView(TypedDict):
    """A trial's current operation (§5.5). ``completed``: it is done, and nothing newer exists at the moment."""

    request_id: str
    length: int
    completed: bool


class CreatedView(TypedDict):
    """The answer to a new experiment; with ``validate_only`` its id is 0."""

    experiment: ExperimentView
    warnings: list[str]


class StartView(TypedDict):
    """The answer to the start of an unmanaged trial."""

    trial_run_id: int
    steps_completed: int
    latest_checkpoint: str | None


class SearchView(TypedDict):
    """Where a search stands. ``rungs`` is for people; ``events`` is how many were recorded."""

    experiment_id: int
    searcher: dict[str, Any]
    progress: float
    rungs: Any
    events: int
    trials_requested: int
    trials_closed: int


class RendezvousView(TypedDict):
    """Where the peers of an allocation are, in the order of their ranks (§6)."""

    addresses: list[str]
    rank: int
    slots: list[int]


class TokenView(TypedDict):
    """Whom the token of an allocation belongs to."""

    allocation_id: str
    task_id: str
    trial_id: int
    experiment_id: int


class MasterView(TypedDict):
    """What the master says of itself."""

    cluster_id: str
    cluster_name: str
    version: str
    slots: list[int]
    slots_in_use: list[int]


class LogPage(TypedDict):
    """Lines of a log; ``ended``: the task is over and no line follows these."""

    lines: list[LogView]
    ended: bool
