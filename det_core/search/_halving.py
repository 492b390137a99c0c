"""What the searches by successive halving share: brackets of rungs (wire contract 12.4 to 12.7)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from det_core.search._actions import Action
from det_core.search._brackets import Plan, plans, timed
from det_core.search._events import Completed, Event, Exited, Started, Validated
from det_core.search._rung import Rung
from det_core.search._search import JSON, Search
from det_core.search._trial import WORST, Trial


class Bracket:
    """One bracket, as it stands."""

    def __init__(self, plan: Plan, divisor: float, *, least: int, newest_first: bool) -> None:
        """Make it empty; at least ``least`` entries of a rung count as its best ones."""
        self.plan = plan
        self.max_trials = plan.max_trials
        """How many trials it will have in the end: fewer than planned when none can be trained."""
        self.created = 0
        """How many it has, those with hyperparameters that cannot be trained not counted."""

        def quota(count: int) -> int:
            return max(int(count / divisor), least)

        self.rungs = [Rung(i, length, quota, newest_first=newest_first) for i, length in enumerate(plan.lengths)]

    @property
    def room(self) -> bool:
        """Whether a trial may be added."""
        return self.created < self.max_trials

    def to_dict(self, *, parks: bool) -> JSON:
        """For a snapshot; ``parks``: whether trials wait on a rung for promotion."""
        top = len(self.rungs) - 1
        return {
            "max_trials": self.max_trials,
            "created": self.created,
            "rungs": [
                {
                    "outstanding": rung.outstanding,
                    "tie": rung.tie,
                    "entries": [[trial.request_id, *key] for trial, *key in rung.entries()],
                    "parked": [trial.request_id for trial in rung.parked()] if parks and rung.number < top else [],
                }
                for rung in self.rungs
            ],
        }

    def load(self, state: Mapping[str, Any], trials: Mapping[str, Trial]) -> None:
        """From a snapshot."""
        self.max_trials, self.created = state["max_trials"], state["created"]
        for rung, saved in zip(self.rungs, state["rungs"], strict=True):
            entries = [(trials[request_id], metric, tie) for request_id, metric, tie in saved["entries"]]
            rung.load(entries, saved["tie"], saved["outstanding"])


class HalvingSearch(Search):
    """Brackets side by side; a trial stays in the one that created it."""

    _newest_first = True
    _least = 1
    _parks = False
    """Whether trials wait on a rung for promotion."""
    _freed = False
    """Whether the last event leaves a slot without a trial."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        divisor = searcher.get("divisor", 4)
        self._brackets = [
            Bracket(plan, divisor, least=self._least, newest_first=self._newest_first) for plan in plans(searcher)
        ]

    def rungs(self) -> list[JSON]:
        return [
            {
                "bracket": number,
                "max_trials": bracket.max_trials,
                "max_concurrent_trials": bracket.plan.concurrent,
                "rungs": [self._described(rung, i) for i, rung in enumerate(bracket.rungs)],
            }
            for number, bracket in enumerate(self._brackets)
        ]

    # For the variants.

    @abstractmethod
    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        """Enter what a trial reported, or the worst metric for one that is over, on the rung it trained for."""

    @abstractmethod
    def _decide(self, event: Event, bracket: Bracket, trial: Trial, out: list[Action]) -> None:
        """Decide on what :meth:`_report` found."""

    def _begin(self, event: Event, bracket: Bracket, out: list[Action]) -> None:
        self._train(self._create(event, out), bracket.plan.lengths[0], out)

    # What Search asks.

    def _react(self, event: Event, trial: Trial | None, out: list[Action]) -> None:
        if trial is not None:
            self._decide(event, self._brackets[trial.bracket], trial, out)
            return
        for bracket in self._brackets:
            for _ in range(min(bracket.plan.concurrent, bracket.max_trials)):
                self._begin(event, bracket, out)

    def _absorb(self, event: Completed | Validated | Exited, trial: Trial, told: int | None) -> None:
        bracket = self._brackets[trial.bracket]
        if isinstance(event, Exited):
            self._freed = told is not None or event.reason == "invalid_hp"
            if event.reason == "invalid_hp":
                self._withdraw(bracket, trial, told)
            elif told is not None:
                trial.metric = WORST
                self._report(bracket, trial, WORST, told)
            return
        self._freed = True
        trial.metric = self._score(event.metric)
        self._report(bracket, trial, trial.metric, event.length if isinstance(event, Completed) else event.step)

    def _withdraw(self, bracket: Bracket, trial: Trial, told: int | None) -> None:
        """Forget a trial whose hyperparameters cannot be trained."""
        for rung in bracket.rungs:
            rung.remove(trial)
        trial.entered = 0
        bracket.created -= 1
        if not self._replaceable():
            bracket.max_trials = bracket.created

    def _entered(self, event: Event, trial: Trial) -> None:
        if isinstance(event, Started):
            full = (i for i, b in enumerate(self._brackets) if b.created < min(b.plan.concurrent, b.max_trials))
            trial.bracket = next(full, len(self._brackets) - 1)
        else:
            creator = self._trials.get(getattr(event, "request_id", ""))
            trial.bracket = creator.bracket if creator else 0
        self._brackets[trial.bracket].created += 1

    def _told(self, trial: Trial) -> None:
        rungs = self._brackets[trial.bracket].rungs
        rung = rungs[trial.rung]
        if trial in rung and trial.rung + 1 < len(rungs):
            trial.rung += 1
        rungs[trial.rung].outstanding += 1

    def _share_done(self) -> float:
        total = sum(bracket.max_trials for bracket in self._brackets)
        entered = sum(len(bracket.rungs[0]) for bracket in self._brackets)
        if not total:
            return 1.0
        share = entered / (1.2 * total)
        if entered < total:
            return share
        exited = sum(count for reason, count in self._exits.items() if reason != "invalid_hp")
        return max(share, exited / total)

    def _method_state(self) -> Any:
        return [bracket.to_dict(parks=self._parks) for bracket in self._brackets]

    def _load_method(self, state: Any) -> None:
        for bracket, saved in zip(self._brackets, state, strict=True):
            bracket.load(saved, self._trials)

    def _described(self, rung: Rung, number: int) -> JSON:
        entries = []
        for trial, score in rung.ranked():
            state = "parked" if not trial.gone else "exited" if trial.exited and not trial.closed else "closed"
            entries.append(
                {
                    "request_id": trial.request_id,
                    "metric": None if score == WORST else self._sign * score,
                    "state": "promoted" if trial.rung > number else state,
                }
            )
        return {"rung": number, "length": rung.length, "outstanding": rung.outstanding, "entries": entries}


def halving_search(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> HalvingSearch:
    """The variant that a configuration of ``async_halving`` or ``adaptive_asha`` asks for."""
    from det_core.search._promotion import PromotionSearch
    from det_core.search._stopping import StoppingSearch, TimedSearch

    if timed(searcher):
        return TimedSearch(searcher, hyperparameters, seed)
    if searcher.get("stop_once", False):
        return StoppingSearch(searcher, hyperparameters, seed)
    return PromotionSearch(searcher, hyperparameters, seed)
