"""What every search must do, as tests that a third party runs on a method of its own.

::

    class TestMySearch(SearchSuite):
        searcher = {"name": "custom", "class": "my_search:MySearch", "max_trials": 20, "metric": "loss"}
        hyperparameters = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}}

The suite needs no test framework: each method that begins with ``test_`` raises AssertionError if the search is wrong.
It runs the search in the simulator, with trials that do well, that fail and that cannot be trained.
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

LIMIT = 100_000
"""Reports after which a search that has not ended never will."""


class SearchSuite:
    """Inherit, and say which search."""

    searcher: ClassVar[Mapping[str, Any]]
    """The configuration's section ``searcher``."""
    hyperparameters: ClassVar[Mapping[str, Any]]
    """Its section ``hyperparameters``."""
    folder: ClassVar[str | None] = None
    """Where the module of a custom method lies, if it cannot be imported as it stands."""
    seeds: ClassVar[Sequence[int]] = (0, 7)
    """Each test is done with each of them."""

    def test_it_ends_by_itself(self) -> None:
        for seed in self.seeds:
            done = self.run(seed)
            assert done.search.over, "the search did not end"
            assert done.search.progress() == 1.0, "a search that is over is not done"
            assert all(trial.exited for trial in done.trials), "the search ended before its trials did"
            assert any(trial.reports for trial in done.trials), "no trial ever trained"

    def test_it_ends_when_trials_fail(self) -> None:
        for seed in self.seeds:
            for share in (0.3, 1.0):
                done = self.run(seed, failing=share)
                shutdown = done.record[-1][1][-1]
                assert isinstance(shutdown, Shutdown), "the search did not end"
                assert shutdown.failure == all(trial.exited == "errored" for trial in done.trials)

    def test_it_ends_when_hyperparameters_cannot_be_trained(self) -> None:
        for seed in self.seeds:
            for share in (0.3, 1.0):
                assert self.run(seed, invalid=share).search.over, "the search did not end"

    def test_one_seed_gives_one_search(self) -> None:
        for seed in self.seeds:
            assert self.run(seed).record == self.run(seed).record, "the search is not deterministic"

    def test_each_decision_can_be_carried_out(self) -> None:
        for seed in self.seeds:
            told: dict[str, int | None] = {}
            for event, actions in self.run(seed, failing=0.2, invalid=0.1).record:
                if isinstance(event, (Completed, Exited)):
                    told[event.request_id] = None
                for action in actions:
                    if isinstance(action, Create):
                        assert action.request_id not in told, f"{action} a second time"
                        told[action.request_id] = None
                    elif isinstance(action, TrainTo):
                        assert told[action.request_id] is None, f"{action} before the operation before it is done"
                        told[action.request_id] = action.length
                    elif isinstance(action, Close):
                        assert action.request_id in told, f"{action} of a trial that is not there"

    def test_the_record_can_be_kept_as_json(self) -> None:
        for event, actions in self.run(self.seeds[0], failing=0.2).record:
            assert event_from_dict(_kept(event.to_dict())) == event
            assert [action_from_dict(_kept(action.to_dict())) for action in actions] == actions

    def test_a_recovered_search_goes_on_as_if_nothing_had_happened(self) -> None:
        for seed in self.seeds:
            record = self.run(seed, failing=0.2, invalid=0.1).record
            for at in self._places(len(record), seed):
                recovered = self.make(seed)
                for event, actions in record[:at]:
                    recovered.apply(event, actions)
                self._goes_on(recovered, record[at:])

    def test_what_is_told_twice_counts_once(self) -> None:
        seed = self.seeds[0]
        search = self.make(seed)
        for event, actions in self.run(seed, failing=0.2).record:
            assert search.handle(event) == actions, f"what was told twice changes what {event} leads to"
            if isinstance(event, (Completed, Exited)):
                assert search.handle(event) == [], f"{event} a second time leads to something"

    def make(self, seed: int) -> Search:
        """The search before its first event."""
        return create_search(self.searcher, self.hyperparameters, seed, folder=self.folder)

    def run(self, seed: int, *, failing: float = 0.0, invalid: float = 0.0) -> Simulation:
        """The search with made-up trials, of which some fail and some cannot be trained."""
        reports = 0

        def objective(hparams: Mapping[str, Any], length: int, number: int) -> Any:
            nonlocal reports
            reports += 1
            assert reports <= LIMIT, f"the search goes on after {LIMIT} reports"
            rng = random.Random(f"{seed} {number}")
            luck, quality = rng.random(), rng.random()
            if luck < failing:
                return "errored"
            return "invalid_hp" if luck < failing + invalid else quality + 1 / (1 + length)

        return simulate(
            self.searcher, self.hyperparameters, seed, objective, slots=3, record=True, search=self.make(seed)
        )

    def _goes_on(self, search: Search, record: Sequence[tuple[Event, list[Action]]]) -> None:
        for event, actions in record:
            assert search.handle(event) == actions, f"after a recovery {event} leads to other decisions"

    def _places(self, count: int, seed: int) -> list[int]:
        return sorted(random.Random(seed).sample(range(1, count), min(5, count - 1)))


def _kept(value: Any) -> Any:
    """What comes back from a file."""
    return json.loads(json.dumps(value, allow_nan=False))
