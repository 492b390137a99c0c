"""Searches that train every trial to the end: single, random and grid (wire contract 12.2, 12.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from det_core.search._actions import Action, Create
from det_core.search._events import Event, Exited, Started
from det_core.search._grid import Grid
from det_core.search._lengths import units_of
from det_core.search._search import JSON, Search
from det_core.search._trial import Trial

DEFAULT_CONCURRENT = 16


class RandomSearch(Search):
    """``max_trials`` trials with hyperparameters drawn at random; ``single`` is one of them.

    A trial whose hyperparameters cannot be trained is replaced, except that of ``single``.
    """

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        super().__init__(searcher, hyperparameters, seed)
        self._length = None if searcher.get("max_length") is None else units_of(searcher["max_length"])
        self._max_trials = self._budget()
        self._concurrent: int = searcher.get("max_concurrent_trials", DEFAULT_CONCURRENT) or self._max_trials

    def _budget(self) -> int:
        return 1 if self._searcher["name"] == "single" else int(self._searcher["max_trials"])

    def _refunded(self) -> int:
        """How many trials do not count."""
        return 0 if self._searcher["name"] == "single" else self._exits["invalid_hp"]

    def _react(self, event: Event, trial: Trial | None, out: list[Action]) -> None:
        if isinstance(event, Started):
            for _ in range(min(self._concurrent, self._max_trials)):
                self._begin(event, out)
            return
        room = len(self._trials) - self._refunded() < self._max_trials
        if room and isinstance(event, Exited) and (event.reason != "invalid_hp" or self._replaceable()):
            self._begin(event, out)

    def _begin(self, event: Event, out: list[Action]) -> None:
        trial = self._create(event, out)
        if self._length is not None:
            self._train(trial, self._length, out)
        self._close(trial, out)

    def _share_done(self) -> float:
        done = 0.0
        for trial in self._trials.values():
            if trial.exited == "invalid_hp" and self._refunded():
                continue
            fraction = trial.units / self._length if self._length else 0.0
            done += 1.0 if trial.exited is not None else min(fraction, 1.0)
        return done / self._max_trials if self._max_trials else 1.0


class GridSearch(RandomSearch):
    """Every combination once, the last one first. None is replaced."""

    def __init__(self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int) -> None:
        self._grid = Grid(hyperparameters)
        super().__init__(searcher, hyperparameters, seed)

    def _budget(self) -> int:
        return len(self._grid)

    def _refunded(self) -> int:
        return 0

    def _replaceable(self) -> bool:
        return True  # the next combination is no replacement

    def _sample(self) -> JSON:
        return self._space.filled(self._grid[len(self._grid) - 1 - len(self._trials)])

    def _redraw(self, action: Create) -> None:
        self._new_id()
        self._random.getrandbits(32)
