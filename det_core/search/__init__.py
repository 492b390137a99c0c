"""Hyperparameter search: pure, seeded methods that replay from their record, and a simulator that trains nothing."""

from det_core.search._create import create_search
from det_core.search._custom import SearchMethod, SearchSetup
from det_core.search._events import (
    Action,
    Close,
    Completed,
    Create,
    Event,
    Exited,
    ExitReason,
    Progress,
    SetProgress,
    Shutdown,
    Started,
    Stop,
    TrainTo,
    TrialCreated,
    Validated,
    action_from_dict,
    event_from_dict,
)
from det_core.search._search import Search
from det_core.search._simulate import SimulatedTrial, Simulation, simulate

__all__ = [
    "Action",
    "Close",
    "Completed",
    "Create",
    "Event",
    "ExitReason",
    "Exited",
    "Progress",
    "Search",
    "SearchMethod",
    "SearchSetup",
    "SetProgress",
    "Shutdown",
    "SimulatedTrial",
    "Simulation",
    "Started",
    "Stop",
    "TrainTo",
    "TrialCreated",
    "Validated",
    "action_from_dict",
    "create_search",
    "event_from_dict",
    "simulate",
]
