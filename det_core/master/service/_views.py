"""Answers of the service to its routes alone: dictionaries with snake_case keys.

What has a form on the wire is in :mod:`det_core.protocol.records`.
"""

from __future__ import annotations

from typing import TypedDict

from det_core.protocol.records import ExperimentView


class OperationView(TypedDict):
    """A trial's current operation (§5.5). ``completed``: it is done, and nothing newer exists at the moment."""

    request_id: str
    length: int
    completed: bool


class CreatedView(TypedDict):
    """The answer to a new experiment; with ``validate_only`` its id is 0."""

    experiment: ExperimentView
    warnings: list[str]


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
