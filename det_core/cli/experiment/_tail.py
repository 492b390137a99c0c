"""Following an experiment: its state, its trials, and each line of their logs once, as they come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from det_core.cli.experiment._told import state_of

if TYPE_CHECKING:
    from det_core.client import Experiment, Master, Trial

SHORTEST, LONGEST = 0.1, 1.0
"""Seconds between two looks: short at first, and while something happens."""
SHARE = 10
"""A look that takes long is followed by a pause this many times as long, so that a large search is not held up."""
QUIET = ("PAUSED", "ACTIVE", "WAITING")
"""States in which a trial prints nothing."""


class Tail:
    """The news of an experiment.

    Args:
        master: where it is.
        experiment: refreshed at each look.
        trial_id: only that trial's lines; None: those of all.
    """

    def __init__(self, master: Master, experiment: Experiment, trial_id: int | None = None) -> None:
        self._master = master
        self.experiment = experiment
        self.trials: list[Trial] = []
        self.over = False
        """Whether it has ended, and every line was given."""
        self._only = trial_id
        self._after: dict[int, int] = {}
        self._settled: dict[int, tuple[Any, ...]] = {}
        self._took = 0.0
        self._pause = SHORTEST

    def new(self) -> list[tuple[Trial, dict[str, Any]]]:
        """Look: the lines that are new, in the order in which they were printed, with their trials."""
        began = time.monotonic()
        ended = self.experiment.refresh().ended
        self.trials = self.experiment.trials()
        lines: list[tuple[Trial, dict[str, Any]]] = []
        more = False
        for trial in self.trials:
            if self._only in (None, trial.id):
                found, full = self._of(trial)
                lines += [(trial, line) for line in found]
                more |= full
        lines.sort(key=lambda pair: pair[1]["id"])
        self.over = ended and not more
        self._took = time.monotonic() - began
        self._pause = 0.0 if more else SHORTEST if lines else min(max(self._pause, SHORTEST) * 1.3, LONGEST)
        return lines

    def pause(self) -> None:
        """Wait until the next look is due."""
        time.sleep(max(self._pause, SHARE * self._took if self._pause else 0.0))

    def _of(self, trial: Trial) -> tuple[list[dict[str, Any]], bool]:
        """The new lines of a trial, and whether there may be more already."""
        from det_core.client._trial import PAGE, log_page

        state = state_of(trial)
        mark = (state, trial.info.get("trial_run_id"))
        if self._settled.get(trial.id) == mark:
            return [], False
        found = log_page(self._master, trial.id, self._after.get(trial.id, 0))
        if found:
            self._after[trial.id] = found[-1]["id"]
        elif trial.ended or state in QUIET:
            self._settled[trial.id] = mark
        return found, len(found) >= PAGE
