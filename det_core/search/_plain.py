"""Searches that train every trial to the end: single, random and grid (wire contract 12.2, 12.3)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from det_core._length import split_length
from det_core.search._events import JSON, Action, Close, Event, Exited, Started, TrainTo
from det_core.search._search import MAX_INVALID_IN_A_ROW, Search, Trial
from det_core.search._space import Grid

DEFAULT_CONCURRENT = 16


def units_of(length: int | Mapping[str, int]) -> int:
    """Return a length of the configuration, ``100`` or ``{"batches": 100}``, as a number of units."""
    units, _ = split_length(length)
    return int(units)


class RandomSearch(Search):
    """``max_trials`` trials with hyperparameters drawn at random; one whose hyperparameters are invalid is replaced.

    Attributes:
        length: Units that each trial trains; None: as long as its script does.
        max_trials: Trials in all, without those that were replaced.
    """

    _replaces = True

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self.length: int | None = None
        if searcher.get("max_length") is not None:
            self.length = units_of(searcher["max_length"])
        self.max_trials = self._budget()

    def _budget(self) -> int:
        return int(self._searcher["max_trials"])

    def _decide(self, event: Event) -> Iterator[Action]:
        if isinstance(event, Started):
            # 0 means as many as there are, to Determined's users.
            concurrent = self._searcher.get("max_concurrent_trials", DEFAULT_CONCURRENT) or self.max_trials
            for _ in range(min(concurrent, self.max_trials)):
                yield from self._start_trial()
        elif isinstance(event, Exited):
            budget = self.max_trials
            if self._replaces:
                budget += self._exits["invalid_hp"]
                # A space of invalid hyperparameters alone would be drawn from for ever.
                if event.reason == "invalid_hp" and self._invalid_in_a_row >= MAX_INVALID_IN_A_ROW:
                    return
            if len(self._trials) < budget:
                yield from self._start_trial()

    def _start_trial(self) -> Iterator[Action]:
        create = self._create_trial()
        yield create
        if self.length is not None:
            yield TrainTo(create.request_id, self.length)
        yield Close(create.request_id)

    def _fraction_done(self) -> float:
        if not self.max_trials:
            return 1.0
        counted = [trial for trial in self._trials.values() if trial.exited != "invalid_hp" or not self._replaces]
        return sum(map(self._fraction_trained, counted)) / self.max_trials

    def _fraction_trained(self, trial: Trial) -> float:
        if trial.exited is not None:
            return 1.0
        if not self.length:
            return 0.0
        return min(trial.units / self.length, 1.0)


class SingleSearch(RandomSearch):
    """One trial, which is not replaced."""

    _replaces = False

    def _budget(self) -> int:
        return 1


class GridSearch(RandomSearch):
    """Every combination once, the last one first; none is replaced."""

    _replaces = False

    def _budget(self) -> int:
        self._grid = Grid(self._space)
        return len(self._grid)

    def _propose(self, rng: random.Random, seed: int) -> JSON:
        # From the last to the first: the order is the wire contract's.
        return self._grid[len(self._grid) - 1 - len(self._trials)]
