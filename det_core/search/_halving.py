"""Asynchronous successive halving: ``async_halving`` and ``adaptive_asha`` (wire contract 12.4 to 12.7).

L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (ASHA); L. Li et al., "Hyperband",
JMLR 18, 2018 (brackets).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from det_core.search._events import JSON, Action, Close, Completed, Create, Event, Exited, Stop, TrainTo, Validated
from det_core.search._plain import DEFAULT_CONCURRENT, units_of
from det_core.search._search import MAX_INVALID_IN_A_ROW, WORST_SCORE, Search, Trial

MODES = ("aggressive", "standard", "conservative")


@dataclass
class Rung:
    """Scores of the trials that trained to one length, in units."""

    length: int
    entries: list[tuple[float, int, Trial]] = field(default_factory=list)
    """Score, place among equal scores, trial; the best first."""
    outstanding: int = 0
    """Number of trials that are training towards it."""
    arrived: int = 0
    """Number of trials that were entered, those that were withdrawn since included."""
    settled: bool = False
    """Whether the trials parked on it were closed since the last one arrived; saves looking at them again."""

    def add(self, trial: Trial, score: float, *, newest_first: bool) -> int:
        """Enter a trial and return its place; of equal scores the oldest, or the newest, is the best."""
        self.arrived += 1
        self.settled = False
        trial.entered += 1
        # The second item is unique, so bisect never compares two trials.
        order = self.arrived
        if newest_first:
            order = -order
        entry = (score, order, trial)
        place = bisect_left(self.entries, entry)
        self.entries.insert(place, entry)
        return place


@dataclass
class Bracket:
    """Rungs that trials climb. Trials with invalid hyperparameters do not count."""

    max_trials: int
    concurrent: int
    """Number of trials that it starts with, and keeps up until ``max_trials`` were created."""
    rungs: list[Rung]
    created: int = 0


def is_time_based(searcher: Mapping[str, Any]) -> bool:
    """Return whether validations drive the search, by the metric ``time_metric``."""
    return searcher.get("time_metric") is not None and searcher.get("max_time") is not None


def brackets(searcher: Mapping[str, Any]) -> list[Bracket]:
    """Return the brackets of a configuration.

    Raises:
        ValueError: If a value is out of range.
    """
    length = units_of(searcher["max_time"] if is_time_based(searcher) else searcher["max_length"])
    trials = int(searcher["max_trials"])
    divisor = searcher.get("divisor", 4)
    concurrent = searcher.get("max_concurrent_trials", DEFAULT_CONCURRENT)
    if length < 1 or trials < 1 or divisor <= 1 or concurrent < 0:
        raise ValueError(
            f"searcher: max_length {length} and max_trials {trials} must be at least 1, divisor {divisor} above 1, "
            f"max_concurrent_trials {concurrent} at least 0"
        )
    if searcher["name"] == "async_halving":
        count = int(searcher["num_rungs"])
        if not concurrent:
            concurrent = int(max(1, min(float(divisor) ** (count - 1), trials)))
        return [Bracket(trials, min(concurrent, trials), _rungs(length, divisor, count))]
    counts = sorted(searcher.get("bracket_rungs") or _rung_counts(searcher, length, trials, divisor), reverse=True)
    # Each bracket is to cost about the same: one of more rungs, whose trials train less, gets more trials.
    weights = [float(divisor) ** (count - 1) / count for count in counts]
    shares = [max(int(weight / sum(weights) * trials), 1) for weight in weights]
    shares[0] += max(trials - sum(shares), 0)
    if concurrent:
        each, more = divmod(max(concurrent, len(counts)), len(counts))
        slots = [each + (i < more) for i in range(len(counts))]
    else:
        slots = [max(shares[-1], int(divisor))] * len(counts)
    return [
        Bracket(share, min(slot, share), _rungs(length, divisor, count))
        for count, share, slot in zip(counts, shares, slots, strict=True)
    ]


def _rungs(length: int, divisor: float, count: int) -> list[Rung]:
    if count < 1:
        raise ValueError(f"searcher: the number of rungs must be at least 1, and is {count}")
    return [Rung(max(int(length / divisor ** (count - 1 - i)), 1)) for i in range(count)]


def _rung_counts(searcher: Mapping[str, Any], length: int, trials: int, divisor: float) -> list[int]:
    mode = searcher.get("mode", "standard")
    if mode not in MODES:
        raise ValueError(f"searcher.mode={mode!r}: expected one of {', '.join(MODES)}")
    # Not by integers: the contract is what float64 gives, truncation included. log(243) / log(3) is 4.99…, and gives 4.
    base = math.log(divisor)
    most = min(searcher.get("max_rungs", 5), int(math.log(length) / base) + 1, int(math.log(trials) / base) + 1)
    least = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[mode]
    return list(range(least, most + 1))


class HalvingSearch(Search):
    """Search with brackets side by side; a trial stays in the one that created it."""

    _has_operations = True
    """Whether each rung is an operation of its own."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._divisor = searcher.get("divisor", 4)
        self._brackets = brackets(searcher)
        self._winner: Trial | None = None
        """Trial that the last event promoted to the next rung."""
        self._reached_top: Trial | None = None
        """Trial that reached the top rung with the last event, where trials wait on rungs."""
        self._slot_freed = False
        """Whether the last event freed a slot."""

    @abstractmethod
    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        """Enter a score on the rung that a trial trained for; of a trial that is over, the worst one."""

    @abstractmethod
    def _answer(self, event: Event, bracket: Bracket, trial: Trial) -> Iterator[Action]:
        """Yield the actions that follow from :meth:`_report`."""

    def _decide(self, event: Event) -> Iterator[Action]:
        if isinstance(event, (Completed, Validated, Exited)):
            trial = self._trials[event.request_id]
            yield from self._answer(event, self._brackets[trial.bracket], trial)
        else:
            for bracket in self._brackets:
                for _ in range(bracket.concurrent):
                    yield from self._start_trial(bracket)

    def _start_trial(self, bracket: Bracket) -> Iterator[Action]:
        create = self._create_trial()
        yield create
        rung = bracket.rungs[-1]
        if self._has_operations:
            rung = bracket.rungs[0]
        yield TrainTo(create.request_id, rung.length)

    def _begin_if_room(self, bracket: Bracket) -> Iterator[Action]:
        if bracket.created < bracket.max_trials:
            yield from self._start_trial(bracket)

    def _on_trial_event(self, event: Completed | Validated | Exited, trial: Trial, target_length: int | None) -> None:
        bracket = self._brackets[trial.bracket]
        self._winner = None
        self._reached_top = None
        if target_length is not None and self._has_operations:
            bracket.rungs[trial.rung].outstanding -= 1
        if isinstance(event, Exited):
            self._slot_freed = target_length is not None or event.reason == "invalid_hp"
            if event.reason == "invalid_hp":
                self._withdraw(bracket, trial)
            elif target_length is not None:
                # Also of a trial that exits with status 0 before it has completed its operation: without its score
                # rung 0 never fills, and the search never ends.
                trial.score = WORST_SCORE
                self._report(bracket, trial, WORST_SCORE, target_length)
            return
        self._slot_freed = True
        trial.score = self._score(event.metric)
        if isinstance(event, Completed):
            self._report(bracket, trial, trial.score, event.length)
        else:
            self._report(bracket, trial, trial.score, event.step)

    def _withdraw(self, bracket: Bracket, trial: Trial) -> None:
        """Remove a trial with invalid hyperparameters, as if it had never been there."""
        for rung in bracket.rungs[: trial.entered]:
            rung.entries = [entry for entry in rung.entries if entry[2] is not trial]
        trial.entered = 0
        bracket.created -= 1
        if self._invalid_in_a_row >= MAX_INVALID_IN_A_ROW:
            bracket.max_trials = bracket.created

    def _on_action(self, event: Event, action: Action, trial: Trial | None) -> None:
        if trial is None:
            return
        if isinstance(action, Create):
            if isinstance(event, (Completed, Validated, Exited)):
                trial.bracket = self._trials[event.request_id].bracket
            else:
                starting = (i for i, bracket in enumerate(self._brackets) if bracket.created < bracket.concurrent)
                trial.bracket = next(starting, len(self._brackets) - 1)
            self._brackets[trial.bracket].created += 1
        elif isinstance(action, TrainTo) and self._has_operations:
            # By the trial's state and not by the winner: a recorded promotion stands, whichever trial would win today.
            rungs = self._brackets[trial.bracket].rungs
            if trial.entered > trial.rung and trial.rung + 1 < len(rungs):
                trial.rung += 1
            rungs[trial.rung].outstanding += 1

    def _fraction_done(self) -> float:
        total = sum(bracket.max_trials for bracket in self._brackets)
        entered = sum(len(bracket.rungs[0].entries) for bracket in self._brackets)
        if not total:
            return 1.0
        # The lowest rung is five sixths of the way, because few of its trials train for the others.
        fraction = entered / (1.2 * total)
        if entered >= total:
            exited = self._exits.total() - self._exits["invalid_hp"]
            fraction = max(fraction, exited / total)
        return fraction

    def rungs(self) -> list[JSON]:
        return [
            {
                "bracket": number,
                "max_trials": bracket.max_trials,
                "max_concurrent_trials": bracket.concurrent,
                "rungs": [self._describe(rung, i) for i, rung in enumerate(bracket.rungs)],
            }
            for number, bracket in enumerate(self._brackets)
        ]

    def _describe(self, rung: Rung, number: int) -> JSON:
        entries = []
        for score, _, trial in rung.entries:
            metric = None
            if score != WORST_SCORE:
                metric = self._sign * score
            state = _state_on(trial, number)
            entries.append({"request_id": trial.request_id, "metric": metric, "state": state})
        return {"rung": number, "length": rung.length, "outstanding": rung.outstanding, "entries": entries}


def _state_on(trial: Trial, rung: int) -> str:
    """Return the state of a trial on a rung, for display."""
    if trial.rung > rung:
        return "promoted"
    if trial.closed:
        return "closed"
    if trial.exited:
        return "exited"
    return "parked"


class PromotionSearch(HalvingSearch):
    """Search that parks a trial at each rung, and promotes it once it is among the best there.

    Of several rungs of one length (which a short ``max_length`` makes) a trial trains for the first only, and its
    metric counts on all of them.
    """

    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        while True:
            rung = bracket.rungs[trial.rung]
            before = int(len(rung.entries) / self._divisor)
            place = rung.add(trial, score, newest_first=False)
            best = int(len(rung.entries) / self._divisor)
            if rung is bracket.rungs[-1]:
                self._reached_top = trial
                return
            if place >= best:
                # Not among the best; but one trial more has made room for one more of them.
                if best == before:
                    return
                trial = rung.entries[best - 1][2]
            if bracket.rungs[trial.rung] is not rung:
                return
            if not trial.is_finished and bracket.rungs[trial.rung + 1].length > rung.length:
                self._winner = trial
                return
            # It is over, or there already in length: it counts on the next rung without training for it.
            score = trial.score
            if trial.is_finished:
                score = WORST_SCORE
            trial.rung += 1

    def _answer(self, event: Event, bracket: Bracket, trial: Trial) -> Iterator[Action]:
        if self._slot_freed:
            if self._reached_top is not None and not self._reached_top.is_finished:
                yield Close(self._reached_top.request_id)
            if self._winner is not None:
                yield TrainTo(self._winner.request_id, bracket.rungs[self._winner.rung + 1].length)
            else:
                yield from self._begin_if_room(bracket)
        if len(bracket.rungs[0].entries) < bracket.max_trials:
            return
        for number, rung in enumerate(bracket.rungs[:-1]):
            if rung.outstanding:
                return
            # Every trial of this rung has arrived, so none can promote those that are parked on it.
            if not rung.settled:
                rung.settled = True
                parked = [trial for _, _, trial in rung.entries if trial.rung == number and not trial.is_finished]
                for trial in parked:
                    yield Close(trial.request_id)


class StoppingSearch(HalvingSearch):
    """Search that promotes a trial at once when it completes a rung, or closes it for good."""

    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        while self._among_best(bracket.rungs[trial.rung], trial, score) and not trial.is_finished:
            if trial.rung + 1 == len(bracket.rungs):
                return
            if bracket.rungs[trial.rung + 1].length > bracket.rungs[trial.rung].length:
                self._winner = trial
                return
            trial.rung += 1

    def _among_best(self, rung: Rung, trial: Trial, score: float) -> bool:
        place = rung.add(trial, score, newest_first=True)
        return place < max(int(len(rung.entries) / self._divisor), 1)

    def _answer(self, event: Event, bracket: Bracket, trial: Trial) -> Iterator[Action]:
        if not self._slot_freed:
            return
        if self._winner is not None:
            yield TrainTo(trial.request_id, bracket.rungs[trial.rung + 1].length)
            return
        if not trial.is_finished:
            yield Close(trial.request_id)
        yield from self._begin_if_room(bracket)


class TimedSearch(StoppingSearch):
    """Search in which every validation counts, at the value of its ``time_metric``; trials train until stopped.

    Each trial has one operation, of the full length, for scripts that use operations.
    """

    event_kinds = HalvingSearch.event_kinds | {"validated"}
    _has_operations = False

    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        if trial.exited is not None:
            # A trial that has exited with status 0 has been entered by its validations.
            if trial.exited != "completed":
                bracket.rungs[trial.rung].add(trial, score, newest_first=True)
            return
        self._winner = trial
        while step >= bracket.rungs[trial.rung].length:
            if not self._among_best(bracket.rungs[trial.rung], trial, score) or trial.rung + 1 == len(bracket.rungs):
                self._winner = None
                return
            trial.rung += 1

    def _answer(self, event: Event, bracket: Bracket, trial: Trial) -> Iterator[Action]:
        if not isinstance(event, Exited):
            if self._winner is not None:
                return
            yield Stop(trial.request_id)
        if self._slot_freed:
            yield from self._begin_if_room(bracket)


def halving_search(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> HalvingSearch:
    """Return the variant of asynchronous halving that a configuration selects."""
    if is_time_based(searcher):
        return TimedSearch(searcher, hyperparameters, seed)
    if searcher.get("stop_once", False):
        return StoppingSearch(searcher, hyperparameters, seed)
    return PromotionSearch(searcher, hyperparameters, seed)
