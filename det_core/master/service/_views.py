"""Answers of the service that are records of no thing: dictionaries with snake_case keys.

Experiments, trials, checkpoints and metrics are in :mod:`det_core.protocol.records`.
"""

from __future__ import annotations

from typing import Any, TypedDict

from det_core.protocol.records import ExperimentView


class LogView(TypedDict):
    """One line of a task's log; ``log`` ends in a newline."""

    id: str
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
    """Owner of the token of an allocation."""

    allocation_id: str
    task_id: str
    trial_id: int
    experiment_id: int


class MasterView(TypedDict):
    """Description of the master."""

    cluster_id: str
    cluster_name: str
    version: str
    slots: list[int]
    slots_in_use: list[int]
