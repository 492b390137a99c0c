"""Test vectors of the wire contract, 12.7."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from det_core.search import create_search, simulate

VECTORS: list[tuple[dict[str, Any], list[tuple[Any, ...]]]] = [
    ({"max_length": 64, "max_trials": 16, "max_rungs": 5}, [(3, 12, 8, [4, 16, 64]), (2, 4, 8, [16, 64])]),
    ({"max_length": 900, "max_trials": 10}, [(2, 7, 8, [225, 900]), (1, 3, 8, [900])]),
    ({"max_length": 1000, "max_trials": 100, "mode": "aggressive"}, [(4, 100, 16, [15, 62, 250, 1000])]),
    (
        {"max_length": 1000, "max_trials": 100, "mode": "conservative", "max_concurrent_trials": 0},
        [(4, 67, 4, None), (3, 21, 4, None), (2, 8, 4, None), (1, 4, 4, None)],
    ),
    (
        {"max_length": 9, "max_trials": 9, "divisor": 3, "mode": "aggressive", "max_concurrent_trials": 0},
        [(3, 9, 9, [1, 3, 9])],
    ),
    ({"max_length": {"epochs": 1}, "max_trials": 5}, [(1, 5, 16, [1])]),
    (
        {"max_length": 100, "max_trials": 50, "max_concurrent_trials": 3},
        [(3, 37, 2, [6, 25, 100]), (2, 13, 1, [25, 100])],
    ),
    ({"max_length": 100, "max_trials": 10, "max_concurrent_trials": 2}, [(2, 7, 1, [25, 100]), (1, 3, 1, [100])]),
    (
        {"max_length": 1000, "max_trials": 10, "divisor": 3.0, "mode": "conservative", "max_concurrent_trials": 5},
        [(3, 7, 2, [111, 333, 1000]), (2, 2, 2, [333, 1000]), (1, 1, 1, [1000])],
    ),
]


@pytest.mark.parametrize("searcher, expected", VECTORS)
def test_brackets_equal_vectors_of_contract(searcher: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    brackets = create_search({"name": "adaptive_asha", **searcher}, {}, 0).rungs()
    assert len(brackets) == len(expected)
    for bracket, (rungs, trials, concurrent, lengths) in zip(brackets, expected, strict=True):
        found = [rung["length"] for rung in bracket["rungs"]]
        assert (len(found), bracket["max_trials"]) == (rungs, trials)
        assert bracket["max_concurrent_trials"] == min(concurrent, trials)
        assert lengths is None or found == lengths


def test_brackets_given_are_taken_largest_first() -> None:
    searcher = {"name": "adaptive_asha", "max_length": 64, "max_trials": 20, "bracket_rungs": [1, 3]}
    assert [len(bracket["rungs"]) for bracket in create_search(searcher, {}, 0).rungs()] == [3, 1]


@pytest.mark.parametrize("concurrent", [0, 1, 2, 16])
def test_halving_with_equal_metrics_equals_vector_of_contract(concurrent: int) -> None:
    searcher = {"name": "async_halving", "num_rungs": 3, "max_trials": 12, "divisor": 3, "max_length": 9000}
    done = simulate({**searcher, "max_concurrent_trials": concurrent}, {}, 0, lambda *_: 1.0, slots=1)
    assert Counter(trial.length for trial in done.trials) == {1000: 8, 3000: 3, 9000: 1}


@pytest.mark.parametrize("concurrent, started", [(0, 9), (5, 5), (16, 12)])
def test_bracket_starts_with_its_share_of_concurrent_trials(concurrent: int, started: int) -> None:
    searcher = {"name": "async_halving", "num_rungs": 3, "max_trials": 12, "divisor": 3, "max_length": 9000}
    (bracket,) = create_search({**searcher, "max_concurrent_trials": concurrent}, {}, 0).rungs()
    assert bracket["max_concurrent_trials"] == started
