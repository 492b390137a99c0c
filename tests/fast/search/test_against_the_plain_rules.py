"""Halving, beside a literal implementation of its rules."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from det_core.search import Close, Completed, Create, Exited, Search, Started, TrainTo, create_search
from support.plain_halving import Plain, PlainPromotion, PlainStopping

STEP = st.tuples(
    st.integers(0, 1000), st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.5, float("nan"), "errored", "invalid_hp"])
)


RUNS = given(
    rungs=st.integers(1, 4),
    trials=st.integers(1, 25),
    divisor=st.sampled_from([2, 3, 4, 1.5, 2.5]),
    concurrent=st.integers(1, 6),
    stop_once=st.booleans(),
    steps=st.lists(STEP, max_size=120),
)


@RUNS
def test_halving_for_any_trials_decides_by_the_rules(**run: Any) -> None:
    compare(**run)


def compare(
    rungs: int, trials: int, divisor: float, concurrent: int, stop_once: bool, steps: list[tuple[int, Any]]
) -> None:
    search = create_search(
        {
            "name": "async_halving", "num_rungs": rungs, "max_trials": trials, "divisor": divisor, "max_length": 10_000,
            "max_concurrent_trials": concurrent, "stop_once": stop_once,
        },
        {"lr": 1},
        0,
    )  # fmt: skip
    lengths = [int(10_000 / divisor ** (rungs - 1 - i)) for i in range(rungs)]
    plain = (PlainStopping if stop_once else PlainPromotion)(lengths, divisor, trials, concurrent)
    both = _Both(search, plain)
    both.same(search.handle(Started()), plain.start())
    for pick, said in steps:
        if not both.told:
            break
        both.step(sorted(both.told)[pick % len(both.told)], said)
    while both.told:  # whatever happened, it ends
        both.step(min(both.told), 1.0)
    for number in range(len(both.names)):
        if number not in both.plain.exited:
            search.handle(Exited(both.names[number], "completed"))
    assert search.over


class _Both:
    """A search and the plain rules, which receive the same events."""

    def __init__(self, search: Search, plain: Plain) -> None:
        self.search, self.plain = search, plain
        self.names: list[str] = []
        self.told: dict[int, int] = {}

    def step(self, trial: int, said: Any) -> None:
        length = self.told.pop(trial)
        if isinstance(said, float):
            actions = self.search.handle(Completed(self.names[trial], length, said))
            self.same(actions, self.plain.report(trial, said if said == said else 1.7976931348623157e308))
        else:
            actions = self.search.handle(Exited(self.names[trial], said))
            self.same(actions, self.plain.exit(trial) if said == "errored" else self.plain.withdraw(trial))

    def same(self, actions: list[Any], expected: list[tuple[Any, ...]]) -> None:
        seen: list[tuple[Any, ...]] = []
        for action in actions:
            if isinstance(action, Create):
                self.names.append(action.request_id)
                seen.append(("create", len(self.names) - 1))
            elif isinstance(action, TrainTo):
                number = self.names.index(action.request_id)
                self.told[number] = action.length
                seen.append(("train", number, action.length))
            elif isinstance(action, Close):
                seen.append(("close", self.names.index(action.request_id)))
        assert seen == expected
