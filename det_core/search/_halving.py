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
    """The scores of the trials that trained to one length, in units."""

    length: int
    entries: list[tuple[float, int, Trial]] = field(default_factory=list)
    """Score, place among equal ones, trial; the best first."""
    outstanding: int = 0
    """How many trials are training towards it."""
    arrived: int = 0
    settled: bool = False
    """Whether those that wait on it were closed since the last one arrived. It only saves looking at them again."""

    def add(self, trial: Trial, score: float, *, newest_first: bool) -> int:
        """Enter a trial, and return its place; of equal scores the oldest, or the newest, is the best."""
        self.arrived += 1
        self.settled = False
        trial.entered += 1
        entry = (score, -self.arrived if newest_first else self.arrived, trial)  # no two are equal in the first two
        place = bisect_left(self.entries, entry)
        self.entries.insert(place, entry)
        return place


@dataclass
class Bracket:
    """Rungs that trials climb. Trials with hyperparameters that cannot be trained do not count."""

    max_trials: int
    concurrent: int
    """How many trials it starts with, and keeps up until there are ``max_trials``."""
    rungs: list[Rung]
    created: int = 0


def is_time_based(searcher: Mapping[str, Any]) -> bool:
    """Whether validations drive it, by the metric ``time_metric``."""
    return searcher.get("time_metric") is not None and searcher.get("max_time") is not None


def brackets(searcher: Mapping[str, Any]) -> list[Bracket]:
    """The brackets that a configuration asks for.

    Do not compute this with integers: the contract is what float64 gives, truncation included. ``log(243) / log(3)`` is
    4.99…, and gives 4.

    Raises:
        ValueError: a value is out of range.
    """
    length = units_of(searcher["max_time"] if is_time_based(searcher) else searcher["max_length"])
    trials, divisor = int(searcher["max_trials"]), searcher.get("divisor", 4)
    concurrent = searcher.get("max_concurrent_trials", DEFAULT_CONCURRENT)
    if length < 1 or trials < 1 or divisor <= 1 or concurrent < 0:
        raise ValueError(
            f"searcher: max_length {length} and max_trials {trials} must be at least 1, divisor {divisor} above 1, "
            f"max_concurrent_trials {concurrent} at least 0"
        )

    def rungs(count: int) -> list[Rung]:
        if count < 1:
            raise ValueError(f"searcher: the number of rungs must be at least 1, and is {count}")
        return [Rung(max(int(length / divisor ** (count - 1 - i)), 1)) for i in range(count)]

    if searcher["name"] == "async_halving":
        count = int(searcher["num_rungs"])
        first = min(concurrent, trials) if concurrent else int(max(1, min(float(divisor) ** (count - 1), trials)))
        return [Bracket(trials, first, rungs(count))]
    counts = sorted(searcher.get("bracket_rungs") or _rung_counts(searcher, length, trials, divisor), reverse=True)
    # Each bracket is to cost about the same: one of more rungs, whose trials train less, gets more trials.
    weights = [float(divisor) ** (count - 1) / count for count in counts]
    shares = [max(int(weight / sum(weights) * trials), 1) for weight in weights]
    shares[0] += max(trials - sum(shares), 0)
    each, more = divmod(max(concurrent, len(counts)), len(counts))
    slots = [each + (i < more) for i in range(len(counts))]
    if not concurrent:
        slots = [max(shares[-1], int(divisor))] * len(counts)
    return [
        Bracket(share, min(slot, share), rungs(count)) for count, share, slot in zip(counts, shares, slots, strict=True)
    ]


def _rung_counts(searcher: Mapping[str, Any], length: int, trials: int, divisor: float) -> list[int]:
    mode = searcher.get("mode", "standard")
    if mode not in MODES:
        raise ValueError(f"searcher.mode is {mode!r}; there are {', '.join(MODES)}")
    base = math.log(divisor)
    most = min(searcher.get("max_rungs", 5), int(math.log(length) / base) + 1, int(math.log(trials) / base) + 1)
    least = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[mode]
    return list(range(least, most + 1))


class HalvingSearch(Search):
    """Brackets side by side; a trial stays in the one that created it."""

    _has_operations = True
    """Whether each rung is an operation of its own."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._divisor = searcher.get("divisor", 4)
        self._brackets = brackets(searcher)
        self._winner: Trial | None = None
        """The trial that goes on to the next rung, because of the last event."""
        self._reached_top: Trial | None = None
        """The trial that reached the top rung with the last event, where trials wait on rungs."""
        self._slot_freed = False
        """Whether the last event freed a slot."""

    @abstractmethod
    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        """Enter a score, or the worst one for a trial that is over, on the rung that the trial trained for."""

    @abstractmethod
    def _answer(self, event: Event, bracket: Bracket, trial: Trial) -> Iterator[Action]:
        """Decide on what :meth:`_report` found."""

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
        yield TrainTo(create.request_id, bracket.rungs[0 if self._has_operations else -1].length)

    def _begin_if_room(self, bracket: Bracket) -> Iterator[Action]:
        if bracket.created < bracket.max_trials:
            yield from self._start_trial(bracket)

    def _on_trial_event(self, event: Completed | Validated | Exited, trial: Trial, target_length: int | None) -> None:
        bracket = self._brackets[trial.bracket]
        self._winner = self._reached_top = None
        if target_length is not None and self._has_operations:
            bracket.rungs[trial.rung].outstanding -= 1
        if isinstance(event, Exited):
            self._slot_freed = target_length is not None or event.reason == "invalid_hp"
            if event.reason == "invalid_hp":
                self._withdraw(bracket, trial)
            elif target_length is not None:
                # Also one that exits with 0 before its operation is done: without its score rung 0 never fills, and
                # the search never ends.
                trial.score = WORST_SCORE
                self._report(bracket, trial, WORST_SCORE, target_length)
            return
        self._slot_freed = True
        trial.score = self._score(event.metric)
        self._report(bracket, trial, trial.score, event.length if isinstance(event, Completed) else event.step)

    def _withdraw(self, bracket: Bracket, trial: Trial) -> None:
        """Forget a trial whose hyperparameters cannot be trained, as if it had never been there."""
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
            # By the trial's state, not by who has won: what was recorded stands, whoever would win today.
            rungs = self._brackets[trial.bracket].rungs
            if trial.entered > trial.rung and trial.rung + 1 < len(rungs):
                trial.rung += 1
            rungs[trial.rung].outstanding += 1

    def _fraction_done(self) -> float:
        total = sum(bracket.max_trials for bracket in self._brackets)
        entered = sum(len(bracket.rungs[0].entries) for bracket in self._brackets)
        if not total:
            return 1.0
        exited = self._exits.total() - self._exits["invalid_hp"]
        return max(entered / (1.2 * total), exited / total if entered >= total else 0.0)

    def rungs(self) -> list[JSON]:
        return [
            {
                "bracket": number,
                "max_trials": bracket.max_trials,
                "max_concurrent_trials": bracket.concurrent,
                "rungs": [self._described(rung, i) for i, rung in enumerate(bracket.rungs)],
            }
            for number, bracket in enumerate(self._brackets)
        ]

    def _described(self, rung: Rung, number: int) -> JSON:
        def state(trial: Trial) -> str:
            if trial.rung > number:
                return "promoted"
            return "parked" if not trial.is_finished else "exited" if trial.exited and not trial.closed else "closed"

        entries = [
            {
                "request_id": t.request_id,
                "metric": None if score == WORST_SCORE else self._sign * score,
                "state": state(t),
            }
            for score, _, t in rung.entries
        ]
        return {"rung": number, "length": rung.length, "outstanding": rung.outstanding, "entries": entries}


class PromotionSearch(HalvingSearch):
    """A trial whose operation is done is parked: it goes on when it turns out to be among the best of its rung.

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
            found = trial if place < best else rung.entries[best - 1][2] if best > before else None
            if found is None or bracket.rungs[found.rung] is not rung:
                return
            if not found.is_finished and bracket.rungs[found.rung + 1].length > rung.length:
                self._winner = found
                return
            # It is over, or there already in length: it counts on the next rung without training for it.
            trial, score = found, WORST_SCORE if found.is_finished else found.score
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
        for number, rung in enumerate(bracket.rungs[:-1]):  # nobody can promote those that wait there any more
            if rung.outstanding:
                return
            waiting = () if rung.settled else [t for _, _, t in rung.entries if t.rung == number and not t.is_finished]
            rung.settled = True
            for parked in waiting:
                yield Close(parked.request_id)


class StoppingSearch(HalvingSearch):
    """A trial goes on to the next rung at once, or is closed for good."""

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
    """Every validation counts, at the step that its ``time_metric`` says; a trial trains on until it is stopped.

    Each trial has one operation, of the full length, for scripts that ask for operations.
    """

    event_kinds = HalvingSearch.event_kinds | {"validated"}
    _has_operations = False

    def _report(self, bracket: Bracket, trial: Trial, score: float, step: int) -> None:
        if trial.exited is not None:
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
    """The variant that a configuration asks for."""
    cls = (
        TimedSearch
        if is_time_based(searcher)
        else StoppingSearch
        if searcher.get("stop_once", False)
        else PromotionSearch
    )
    return cls(searcher, hyperparameters, seed)
