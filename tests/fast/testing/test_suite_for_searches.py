"""Conformance suite for searches: run on ours, and on faulty ones that it must find."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from det_core.search import Action, Close, Create, Event, Exited, SearchMethod, Started, TrainTo
from det_core.testing import SearchSuite

HYPERPARAMETERS = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1, "count": 3},
    "layers": {"type": "int", "minval": 1, "maxval": 8, "count": 3},
    "nested": {"act": {"type": "categorical", "vals": ["relu", "gelu", [1, 2]]}, "fixed": {"type": "const", "val": 3}},
}


def suite(seeds: Sequence[int] = (0, 7), **searcher: Any) -> type[SearchSuite]:
    return type("Suite", (SearchSuite,), {"searcher": searcher, "hyperparameters": HYPERPARAMETERS, "seeds": seeds})


HALVING = {"name": "async_halving", "num_rungs": 3, "max_trials": 30, "divisor": 3, "max_length": 90}
ADAPTIVE = {"name": "adaptive_asha", "mode": "conservative", "max_trials": 40, "max_length": 64}


class TestSingle(suite(**{"name": "single", "max_length": 10})):
    pass


class TestRandom(
    suite(**{"name": "random", "max_trials": 12, "max_length": {"epochs": 4}, "max_concurrent_trials": 4})
):
    pass


class TestGrid(suite(**{"name": "grid", "max_length": 4, "max_concurrent_trials": 0})):
    pass


class TestPromotion(suite(**HALVING)):
    pass


class TestPromotionOnRungsOfOneLength(
    suite(**{"name": "async_halving", "num_rungs": 5, "max_trials": 40, "divisor": 2, "max_length": 3})
):
    pass


class TestStopping(suite(**{**HALVING, "stop_once": True, "smaller_is_better": False})):
    pass


class TestTimed(suite(**{**HALVING, "time_metric": "batches", "max_time": 90})):
    pass


class TestAdaptive(suite(**ADAPTIVE)):
    pass


class TestAdaptiveTimed(suite(**{**ADAPTIVE, "time_metric": "batches", "max_time": 64})):
    pass


class TestOptuna(
    suite((3,), **{"name": "optuna", "sampler": "random", "max_trials": 8, "max_length": 4, "max_concurrent_trials": 3})
):
    pass


class Halver(SearchMethod):
    """Method that trains eight trials a little, then the best four more."""

    def __init__(self, setup: Any) -> None:
        super().__init__(setup)
        self.metrics: dict[str, float] = {}
        self.waiting: list[str] = []

    def handle(self, event: Event) -> Sequence[Action]:
        actions: list[Action] = []
        if isinstance(event, Started):
            for _ in range(8):
                new = self.create()
                self.waiting.append(new.request_id)
                actions += [new, TrainTo(new.request_id, 1)]
            return actions
        name = event.request_id  # type: ignore[union-attr]
        if name in self.waiting:
            self.waiting.remove(name)
            if not isinstance(event, Exited):
                self.metrics[name] = event.metric  # type: ignore[union-attr]
            if not self.waiting:
                for place, best in enumerate(sorted(self.metrics, key=self.metrics.__getitem__)):
                    actions += [Close(best)] if place >= 4 else [TrainTo(best, 5), Close(best)]
        return actions


class TestCustom(suite(**{"name": "custom", "class": f"{__name__}:Halver"})):
    pass


class Unseeded(Halver):
    def create(self, hparams: Any = None) -> Create:
        return super().create({"lr": random.SystemRandom().random()})


class NeverEnding(SearchMethod):
    def handle(self, event: Event) -> Sequence[Action]:
        new = self.create()
        return [new, TrainTo(new.request_id, 1), Close(new.request_id)]


class Outside(Halver):
    """Method that decides by state outside of its record."""

    lengths = itertools.count(2)

    def handle(self, event: Event) -> Sequence[Action]:
        return [
            TrainTo(a.request_id, next(self.lengths)) if isinstance(a, TrainTo) else a for a in super().handle(event)
        ]


@pytest.mark.parametrize(
    "wrong, test",
    [
        (Unseeded, "test_search_of_one_seed_is_deterministic"),
        (NeverEnding, "test_search_ends_by_itself"),
        (Outside, "test_search_recovered_decides_the_same"),
    ],
)
def test_suite_finds_faulty_search(wrong: type, test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.testing._searches.MAX_REPORTS", 300)
    with pytest.raises(AssertionError):
        getattr(suite(**{"name": "custom", "class": f"{__name__}:{wrong.__name__}"})(), test)()
