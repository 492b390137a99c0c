"""The scheduler: pure decisions on who runs, what an exit means, what a trial does next, which checkpoints stay."""

from det_core.master.scheduler._decide import DEFAULT_PRIORITY, Decision, Running, Start, Wanting, decide
from det_core.master.scheduler._exit import ExitFacts, ExitKind, Failure, ProcessExit, classify
from det_core.master.scheduler._losses import Losses
from det_core.master.scheduler._retention import Kept, expired
from det_core.master.scheduler._states import Phase, State, experiment_may, trial_may
from det_core.master.scheduler._trial import Next, Step, TrialFacts, after_exit

__all__ = [
    "DEFAULT_PRIORITY",
    "Decision",
    "ExitFacts",
    "ExitKind",
    "Failure",
    "Kept",
    "Losses",
    "Next",
    "Phase",
    "ProcessExit",
    "Running",
    "Start",
    "State",
    "Step",
    "TrialFacts",
    "Wanting",
    "after_exit",
    "classify",
    "decide",
    "experiment_may",
    "expired",
    "trial_may",
]
