"""The scheduler: pure decisions on who runs, what an exit means, what a trial does next, which checkpoints stay."""

from det_core.master.scheduler._exits import Cause, ExitKind, Losses, Next, Step, TrialFacts, after_exit, classify
from det_core.master.scheduler._placement import (
    DEFAULT_PRIORITY,
    Decision,
    PendingAllocation,
    Placement,
    Pool,
    RunningAllocation,
    decide,
)
from det_core.master.scheduler._retention import Kept, expired
from det_core.master.scheduler._states import Phase, State

__all__ = [
    "DEFAULT_PRIORITY",
    "Cause",
    "Decision",
    "ExitKind",
    "Kept",
    "Losses",
    "Next",
    "PendingAllocation",
    "Phase",
    "Placement",
    "Pool",
    "RunningAllocation",
    "State",
    "Step",
    "TrialFacts",
    "after_exit",
    "classify",
    "decide",
    "expired",
]
