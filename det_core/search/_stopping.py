"""Successive halving by stopping: trials that are not among the best of their rung end (wire contract 12.6)."""

from __future__ import annotations

from det_core.search._actions import Action
from det_core.search._events import Completed, Event, Validated
from det_core.search._halving import Bracket, HalvingSearch
from det_core.search._trial import Trial


class StoppingSearch(HalvingSearch):
    """A trial goes on to the next rung at once, or is closed for good."""

    _goes_on = False
    """Whether the trial of the last event goes on."""

    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        self._goes_on = False
        rungs = bracket.rungs
        rungs[trial.rung].outstanding -= 1
        while True:
            rung = rungs[trial.rung]
            among_best = rung.add(trial, score) is trial
            if trial.gone or not among_best or trial.rung + 1 == len(rungs):
                return
            if rungs[trial.rung + 1].length > rung.length:
                self._goes_on = True
                return
            trial.rung += 1

    def _withdraw(self, bracket: Bracket, trial: Trial, told: int | None) -> None:
        self._goes_on = False
        if told is not None:
            bracket.rungs[trial.rung].outstanding -= 1
        super()._withdraw(bracket, trial, told)

    def _decide(self, event: Event, bracket: Bracket, trial: Trial, out: list[Action]) -> None:
        if not self._freed:
            return
        if self._goes_on:
            self._train(trial, bracket.rungs[trial.rung + 1].length, out)
            return
        if not trial.gone:
            self._close(trial, out)
        if bracket.room:
            self._begin(event, bracket, out)


class TimedSearch(HalvingSearch):
    """Every validation counts, at the step that its ``time_metric`` says; a trial trains on until it is stopped.

    Each trial has one operation, of the full length, for scripts that ask for operations.
    """

    uses = HalvingSearch.uses | {"validated"}
    _stops = False
    """Whether the trial of the last event is stopped."""

    def _begin(self, event: Event, bracket: Bracket, out: list[Action]) -> None:
        self._train(self._create(event, out), bracket.plan.lengths[-1], out)

    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        self._stops = False
        rungs = bracket.rungs
        if trial.exited is not None:
            if trial.exited != "completed":
                rungs[trial.rung].add(trial, score)
            return
        while step >= rungs[trial.rung].length:
            among_best = rungs[trial.rung].add(trial, score) is trial
            if not among_best or trial.rung + 1 == len(rungs):
                self._stops = True
                return
            trial.rung += 1

    def _told(self, trial: Trial) -> None:
        return None

    def _decide(self, event: Event, bracket: Bracket, trial: Trial, out: list[Action]) -> None:
        if isinstance(event, (Completed, Validated)):
            if not self._stops:
                return
            self._stop(trial, out)
        if self._freed and bracket.room:
            self._begin(event, bracket, out)
