"""Conformance suite for searches, for your own methods as well.

::

    class TestMySearch(SearchSuite):
        searcher = {"name": "custom", "class": "my_search:MySearch", "max_trials": 20, "metric": "loss"}
        hyperparameters = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}}

The suite needs no test framework: each method that begins with ``test_`` raises AssertionError if the search is faulty.
It runs the search in the simulator, with trials that succeed, that fail and whose hyperparameters are invalid.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from det_core.search import (
    Action,
    Close,
    Completed,
    Create,
    Event,
    Exited,
    Search,
    Shutdown,
    Simulation,
    TrainTo,
    action_from_dict,
    create_search,
    event_from_dict,
    simulate,
)

MAX_REPORTS = 100_000
"""Reports after which a search counts as endless."""


class SearchSuite:
    """Suite of one search: inherit, and set its configuration."""

    searcher: ClassVar[Mapping[str, Any]]
    """Section ``searcher`` of the configuration."""
    hyperparameters: ClassVar[Mapping[str, Any]]
    """Section ``hyperparameters`` of the configuration."""
    folder: ClassVar[str | None] = None
    """Directory of a custom method's module, unless it is on the import path."""
    seeds: ClassVar[Sequence[int]] = (0, 7)
    """Seeds; each test runs with each of them."""

    def test_search_ends_by_itself(self) -> None:
        for seed in self.seeds:
            done = self.run(seed)
            assert done.search.over, "the search did not end"
            assert done.search.progress() == 1.0, "a search that is over has not all of its progress"
            assert all(trial.exited for trial in done.trials), "the search ended before its trials did"
            assert any(trial.reports for trial in done.trials), "no trial ever trained"

    def test_search_with_failing_trials_ends(self) -> None:
        for seed in self.seeds:
            for share in (0.3, 1.0):
                done = self.run(seed, failing=share)
                shutdown = done.record[-1][1][-1]
                assert isinstance(shutdown, Shutdown), "the search did not end"
                assert shutdown.failure == all(trial.exited == "errored" for trial in done.trials)

    def test_search_with_invalid_hyperparameters_ends(self) -> None:
        for seed in self.seeds:
            for share in (0.3, 1.0):
                assert self.run(seed, invalid=share).search.over, "the search did not end"

    def test_search_of_one_seed_is_deterministic(self) -> None:
        for seed in self.seeds:
            assert self.run(seed).record == self.run(seed).record, "the search is not deterministic"

    def test_search_decisions_are_valid(self) -> None:
        for seed in self.seeds:
            lengths: dict[str, int | None] = {}
            for event, actions in self.run(seed, failing=0.2, invalid=0.1).record:
                if isinstance(event, (Completed, Exited)):
                    lengths[event.request_id] = None
                for action in actions:
                    if isinstance(action, Create):
                        assert action.request_id not in lengths, f"{action} twice"
                        lengths[action.request_id] = None
                    elif isinstance(action, TrainTo):
                        assert lengths[action.request_id] is None, f"{action} before the trial completed its operation"
                        lengths[action.request_id] = action.length
                    elif isinstance(action, Close):
                        assert action.request_id in lengths, f"{action} of an unknown trial"

    def test_search_record_survives_json(self) -> None:
        for event, actions in self.run(self.seeds[0], failing=0.2).record:
            assert event_from_dict(_kept(event.to_dict())) == event
            assert [action_from_dict(_kept(action.to_dict())) for action in actions] == actions

    def test_search_recovered_decides_the_same(self) -> None:
        for seed in self.seeds:
            record = self.run(seed, failing=0.2, invalid=0.1).record
            for at in self._places(len(record), seed):
                # A master may die after any event, so any beginning of the record must do.
                recovered = self.make(seed)
                for event, actions in record[:at]:
                    recovered.apply(event, actions)
                self._replay(recovered, record[at:])

    def test_search_ignores_repeated_events(self) -> None:
        seed = self.seeds[0]
        search = self.make(seed)
        for event, actions in self.run(seed, failing=0.2).record:
            assert search.handle(event) == actions, f"an earlier repeated event changed the decisions on {event}"
            # A killed master sends the last events again.
            if isinstance(event, (Completed, Exited)):
                assert search.handle(event) == [], f"{event} repeated has actions"

    def make(self, seed: int) -> Search:
        """Return the search before its first event."""
        return create_search(self.searcher, self.hyperparameters, seed, folder=self.folder)

    def run(self, seed: int, *, failing: float = 0.0, invalid: float = 0.0) -> Simulation:
        """Run the search with simulated trials.

        Args:
            seed: Seed of the search and of the trials.
            failing: Fraction of the trials that fail.
            invalid: Fraction of the trials whose hyperparameters are invalid.
        """
        reports = 0

        def objective(hparams: Mapping[str, Any], length: int, number: int) -> Any:
            nonlocal reports
            reports += 1
            assert reports <= MAX_REPORTS, f"the search continues after {MAX_REPORTS} reports"
            # Of the trial's number alone: a recovered search must meet the same trials.
            rng = random.Random(f"{seed} {number}")
            luck = rng.random()
            quality = rng.random()
            if luck < failing:
                return "errored"
            if luck < failing + invalid:
                return "invalid_hp"
            return quality + 1 / (1 + length)

        return simulate(
            self.searcher, self.hyperparameters, seed, objective, slots=3, record=True, search=self.make(seed)
        )

    def _replay(self, search: Search, record: Sequence[tuple[Event, list[Action]]]) -> None:
        for event, actions in record:
            assert search.handle(event) == actions, f"a recovered search decides differently on {event}"

    def _places(self, count: int, seed: int) -> list[int]:
        return sorted(random.Random(seed).sample(range(1, count), min(5, count - 1)))


def _kept(value: Any) -> Any:
    """Return a value as it comes back from a file."""
    return json.loads(json.dumps(value, allow_nan=False))
