"""Hyperparameter search: pure, seeded, replayable methods, and a simulator that runs one without training."""

from det_core.search._actions import Action, Close, Create, SetProgress, Shutdown, Stop, TrainTo, action_from_dict
from det_core.search._create import create_search
from det_core.search._events import (
    Completed,
    Event,
    Exited,
    Posted,
    Progress,
    Reason,
    Started,
    TrialCreated,
    Validated,
    event_from_dict,
)
from det_core.search._method import SearchMethod, SearchSetup
from det_core.search._random import RandomState
from det_core.search._search import Search
from det_core.search._simulate import SimulatedTrial, Simulation, simulate

__all__ = [
    "Action",
    "Close",
    "Completed",
    "Create",
    "Event",
    "Exited",
    "Posted",
    "Progress",
    "RandomState",
    "Reason",
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
