"""Searches that train every trial to the end: single, random and grid (wire contract 12.2, 12.3)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from det_core._length import split_length
from det_core.search._events import JSON, Action, Close, Event, Exited, Started, TrainTo
from det_core.search._search import MAX_INVALID_IN_A_ROW, Search
from det_core.search._space import Grid

DEFAULT_CONCURRENT = 16


def units_of(length: int | Mapping[str, int]) -> int:
    """Return a length of the configuration, ``100`` or ``{"batches": 100}``, as a number of units."""
    units, _ = split_length(length)
    return int(units)


class RandomSearch(Search):
    """``max_trials`` trials with hyperparameters drawn at random; one that cannot be trained is replaced."""

    _replaces = True

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self.length: int | None = None if searcher.get("max_length") is None else units_of(searcher["max_length"])
        """How many units each trial trains; None: as long as its script does."""
        self.max_trials = self._budget()

    def _budget(self) -> int:
        return int(self._searcher["max_trials"])

    def _decide(self, event: Event) -> Iterator[Action]:
        if isinstance(event, Started):
            concurrent = self._searcher.get("max_concurrent_trials", DEFAULT_CONCURRENT) or self.max_trials
            for _ in range(min(concurrent, self.max_trials)):
                yield from self._start_trial()
        elif isinstance(event, Exited):
            refunded = self._exits["invalid_hp"] if self._replaces else 0
            futile = self._replaces and event.reason == "invalid_hp" and self._invalid_in_a_row >= MAX_INVALID_IN_A_ROW
            if len(self._trials) - refunded < self.max_trials and not futile:
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
        length = self.length or float("inf")
        return sum(1.0 if t.exited is not None else min(t.units / length, 1.0) for t in counted) / self.max_trials


class SingleSearch(RandomSearch):
    """One trial, which is not replaced."""

    _replaces = False

    def _budget(self) -> int:
        return 1


class GridSearch(RandomSearch):
    """Every combination once, the last one first. None is replaced."""

    _replaces = False

    def _budget(self) -> int:
        self._grid = Grid(self._space)
        return len(self._grid)

    def _propose(self, rng: random.Random, seed: int) -> JSON:
        return self._grid[len(self._grid) - 1 - len(self._trials)]
