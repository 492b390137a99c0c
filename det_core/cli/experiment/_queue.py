"""Why an experiment does not begin: said once it has waited for a while, and again when the reason changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from det_core.client import Experiment, Trial

PATIENCE = 1.0
"""Seconds that a trial may be queued without a word."""
AGAIN = 5.0
"""Seconds between two looks at who holds the slots."""
HOLDING = ("RUNNING", "STARTING", "PULLING", "PAUSING")
"""States of trials that have their slots."""
_GOING = ("ACTIVE", "PAUSED", "STOPPING_CANCELED", "STOPPING_KILLED", "STOPPING_COMPLETED", "STOPPING_ERROR")
_MOST = 5


class Queue:
    """Looks now and then at an experiment that is followed."""

    def __init__(self) -> None:
        self._due = time.monotonic() + PATIENCE
        self._told = ""

    def news(self, experiment: Experiment, trials: Sequence[Trial]) -> str:
        """Why nothing of it runs, if that is so and is not told yet; else empty."""
        if experiment.ended or any(trial.state in HOLDING for trial in trials):
            self._due, self._told = time.monotonic() + PATIENCE, ""
            return ""
        if time.monotonic() < self._due:
            return ""
        self._due = time.monotonic() + AGAIN
        why = _why(experiment, trials)
        if why == self._told:
            return ""
        self._told = why
        return why


def _why(experiment: Experiment, trials: Sequence[Trial]) -> str:
    if experiment.state == "PAUSED":
        return f"experiment {experiment.id} is paused: `det-core experiment activate {experiment.id}` has it go on"
    if not any(trial.state == "QUEUED" for trial in trials):
        return ""
    told = experiment.master.get("master")
    slots, used = int(told.get("slots") or 0), int(told.get("slotsInUse") or 0)
    needed = experiment.config.get("resources", {}).get("slots_per_trial", 1)
    others = _holders(experiment)
    by = f": {', '.join(others)}" if others else ""
    return f"queued: a trial of experiment {experiment.id} needs {needed} slot(s), and {used} of {slots} are in use{by}"


def _holders(experiment: Experiment) -> list[str]:
    """The other experiments of which trials hold slots."""
    from det_core.client._experiment import Experiment

    told = experiment.master.get("experiments", states=[f"STATE_{name}" for name in _GOING], limit=100)["experiments"]
    found = []
    for other in (Experiment(experiment.master, one) for one in told):
        if other.id == experiment.id:
            continue
        count = sum(t.state in HOLDING or t.state.startswith("STOPPING") for t in other.trials())
        if count:
            found.append(f"experiment {other.id} ({other.name}) has {count} trial(s) at work")
    return found[:_MOST] + ["…"] * (len(found) > _MOST)
