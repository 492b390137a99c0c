"""Recovery of searches: at any moment one equals its record applied to a new one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from det_core.search import (
    Action,
    Close,
    Completed,
    Event,
    Exited,
    Started,
    Stop,
    TrainTo,
    Validated,
    action_from_dict,
    create_search,
    event_from_dict,
)

HALVING = {"num_rungs": 3, "max_trials": 14, "divisor": 2, "max_length": 12, "max_concurrent_trials": 4}
ADAPTIVE = {"name": "adaptive_asha", "max_trials": 20, "max_length": 32, "divisor": 2, "mode": "conservative"}
SEARCHERS = [
    {"name": "random", "max_trials": 6, "max_length": 3, "max_concurrent_trials": 2},
    {"name": "grid", "max_length": 3, "max_concurrent_trials": 2},
    {"name": "async_halving", **HALVING},
    {"name": "async_halving", **HALVING, "max_length": 3},
    {"name": "async_halving", **HALVING, "stop_once": True, "smaller_is_better": False},
    {"name": "async_halving", **HALVING, "time_metric": "batches", "max_time": 12},
    ADAPTIVE,
    {**ADAPTIVE, "stop_once": True},
]
SPACE = {
    "x": {"type": "double", "minval": 0, "maxval": 1, "count": 5},
    "n": {"m": {"type": "categorical", "vals": "ab"}},
}
METRICS = st.sampled_from([0.0, 1.0, 2.0, -1.5, float("nan"), float("inf")])
PICK = st.integers(0, 100)


class Recovery(RuleBasedStateMachine):
    """Arbitrary trials, under a master that is killed and restarted."""

    @initialize(searcher=st.sampled_from(SEARCHERS), seed=st.integers(0, 5))
    def start(self, searcher: dict[str, Any], seed: int) -> None:
        self.made_of = (searcher, SPACE, seed)
        self.search = create_search(*self.made_of)
        self.other = create_search(*self.made_of)
        """Search last recovered, which receives the same events and must decide the same."""
        self.record: list[tuple[Event, list[Action]]] = []
        self.told: dict[str, int] = {}
        self.over: set[str] = set()
        self.closed: list[str] = []
        self.tell(Started())

    def tell(self, event: Event) -> None:
        actions = self.search.handle(event)
        assert self.other.handle(event) == actions
        self.record.append((event, actions))
        for action in actions:
            if isinstance(action, TrainTo):
                self.told[action.request_id] = action.length
            elif isinstance(action, (Close, Stop)):
                self.closed.append(action.request_id)
            if isinstance(action, Stop):
                self.told.pop(action.request_id, None)

    @precondition(lambda self: self.told)
    @rule(pick=PICK, metric=METRICS)
    def a_trial_is_done(self, pick: int, metric: float) -> None:
        name = sorted(self.told)[pick % len(self.told)]
        self.tell(Completed(name, self.told.pop(name), metric))

    @precondition(lambda self: self.told)
    @rule(pick=PICK, metric=METRICS, step=st.integers(0, 12))
    def a_trial_validates(self, pick: int, metric: float, step: int) -> None:
        self.tell(Validated(sorted(self.told)[pick % len(self.told)], step, metric))

    @precondition(lambda self: self.told)
    @rule(pick=PICK, reason=st.sampled_from(["errored", "canceled", "invalid_hp", "completed"]))
    def a_trial_ends_early(self, pick: int, reason: Any) -> None:
        name = sorted(self.told)[pick % len(self.told)]
        del self.told[name]
        self.tell(Exited(name, reason))

    @precondition(lambda self: self.closed)
    @rule(pick=PICK)
    def a_closed_trial_ends(self, pick: int) -> None:
        name = self.closed.pop(pick % len(self.closed))
        self.told.pop(name, None)
        self.tell(Exited(name, "completed"))

    @precondition(lambda self: self.search.rungs())
    @rule(pick=PICK, reason=st.sampled_from(["canceled", "invalid_hp"]))
    def a_parked_trial_ends(self, pick: int, reason: Any) -> None:
        entries = [entry for b in self.search.rungs() for rung in b["rungs"] for entry in rung["entries"]]
        parked = [e["request_id"] for e in entries if e["state"] == "parked" and e["request_id"] not in self.told]
        if parked:
            self.tell(Exited(parked[pick % len(parked)], reason))

    @rule()
    def it_is_recovered(self) -> None:
        recovered = create_search(*self.made_of)
        for event, actions in self.record:
            kept = json.loads(json.dumps([event.to_dict(), [action.to_dict() for action in actions]], allow_nan=False))
            recovered.apply(event_from_dict(kept[0]), [action_from_dict(action) for action in kept[1]])
        assert recovered.rungs() == self.search.rungs()
        assert (recovered.progress(), recovered.over) == (self.search.progress(), self.search.over)
        self.other = recovered

    def teardown(self) -> None:
        """End the search by completing its operations, whatever happened before."""
        if not hasattr(self, "search"):
            return
        for _ in range(1000):
            if self.told:
                name = min(self.told)
                self.tell(Completed(name, self.told.pop(name), 1.0))
            elif self.closed:
                self.tell(Exited(self.closed.pop(), "completed"))
        assert self.search.over


Recovery.TestCase.settings = settings(stateful_step_count=30)
TestRecovery = Recovery.TestCase
