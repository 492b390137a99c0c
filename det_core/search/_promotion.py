"""Successive halving by promotion: trials wait on their rung until enough others are worse (wire contract 12.5)."""

from __future__ import annotations

from det_core.search._actions import Action
from det_core.search._events import Event
from det_core.search._halving import Bracket, HalvingSearch
from det_core.search._trial import WORST, Trial


class PromotionSearch(HalvingSearch):
    """A trial whose operation is done is parked: it goes on when it turns out to be among the best of its rung.

    Of several rungs of one length (which a short ``max_length`` makes) a trial trains for the first only, and its
    metric counts on all of them.
    """

    _newest_first = False
    _least = 0
    _parks = True
    _promoted: Trial | None = None
    """Whom the last event promotes."""
    _topped: Trial | None = None
    """Who has reached the top without training, being there already in length."""

    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        bracket.rungs[trial.rung].outstanding -= 1
        self._promoted = self._topped = None
        top, candidate = len(bracket.rungs) - 1, trial
        while candidate.rung < top:
            rung = bracket.rungs[candidate.rung]
            found = rung.add(candidate, score)
            if found is None or bracket.rungs[found.rung] is not rung:
                return
            if not found.gone and bracket.rungs[found.rung + 1].length > rung.length:
                self._promoted = found
                return
            score = WORST if found.gone else found.metric
            found.rung += 1
            candidate = found
        bracket.rungs[top].add(candidate, score)
        self._topped = candidate

    def _withdraw(self, bracket: Bracket, trial: Trial, told: int | None) -> None:
        self._promoted = self._topped = None
        if told is not None:
            bracket.rungs[trial.rung].outstanding -= 1
        super()._withdraw(bracket, trial, told)

    def _decide(self, event: Event, bracket: Bracket, trial: Trial, out: list[Action]) -> None:
        if self._freed:
            if self._topped is not None and not self._topped.gone:
                self._close(self._topped, out)
            if self._promoted is not None:
                self._train(self._promoted, bracket.rungs[self._promoted.rung + 1].length, out)
            elif bracket.room:
                self._begin(event, bracket, out)
        self._close_parked(bracket, out)

    def _close_parked(self, bracket: Bracket, out: list[Action]) -> None:
        """Close those that nobody can promote any more."""
        if len(bracket.rungs[0]) < bracket.max_trials:
            return
        for rung in bracket.rungs:
            if rung.outstanding:
                return
            if not rung.settled:
                rung.settled = True
                if rung.number + 1 < len(bracket.rungs):
                    for trial in rung.parked_ranked():
                        self._close(trial, out)
