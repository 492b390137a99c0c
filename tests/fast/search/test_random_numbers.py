"""The random numbers are numpy's, and are drawn in the order of the wire contract 11.2."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.search import Create, RandomState, Started, create_search

numpy = pytest.importorskip("numpy")
SEEDS = st.integers(0, 2**32 - 1)


@given(
    seed=SEEDS,
    draws=st.lists(
        st.one_of(
            st.tuples(st.just("uniform"), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)),
            st.tuples(st.just("randint"), st.integers(-(2**62), 2**62), st.integers(1, 2**33)),
            st.tuples(st.just("bytes"), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
)
def test_each_draw_is_that_of_numpy(seed: int, draws: list[Any]) -> None:
    ours, theirs = RandomState(seed), numpy.random.RandomState(seed)
    for what, low, other in draws:
        if what == "uniform":
            low, high = min(low, other), max(low, other)
            assert ours.uniform(low, high) == theirs.uniform(low, high)
        elif what == "randint":
            assert ours.randint(low, low + other) == theirs.randint(low, low + other, dtype=numpy.int64)
        else:
            assert ours.bytes16() == theirs.bytes(16)


@given(seed=SEEDS, before=st.integers(0, 1500))
def test_the_state_can_be_kept(seed: int, before: int) -> None:
    one, other = RandomState(seed), RandomState(0)
    for _ in range(before):
        one.random()
    other.set_state(one.state())
    assert [one.random() for _ in range(3)] == [other.random() for _ in range(3)]


def test_a_seed_out_of_range_is_refused() -> None:
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=str(seed)):
            RandomState(seed)


def test_a_trial_draws_in_the_order_of_the_contract() -> None:
    hyperparameters = {
        "z": {"type": "double", "minval": 0.5, "maxval": 2},
        "a": {"type": "int", "minval": 3, "maxval": 9},
        "m": {"y": {"type": "categorical", "vals": ["p", "q", "r"]}, "b": {"type": "double", "minval": 0, "maxval": 1}},
        "k": {"type": "log", "base": 10, "minval": -5, "maxval": -1},
        "fixed": [1, 2],
    }
    theirs = numpy.random.RandomState(99)
    actions = create_search({"name": "random", "max_trials": 3, "max_length": 5}, hyperparameters, 99).handle(Started())
    created = [action for action in actions if isinstance(action, Create)]
    assert len(created) == 3
    for trial in created:
        assert trial.hparams["a"] == theirs.randint(3, 10)
        assert trial.hparams["fixed"] == [1, 2]
        assert trial.hparams["k"] == 10 ** theirs.uniform(-5, -1)
        assert trial.hparams["m"]["b"] == theirs.uniform(0, 1)
        assert trial.hparams["m"]["y"] == "pqr"[theirs.randint(0, 3)]
        assert trial.hparams["z"] == theirs.uniform(0.5, 2)
        assert trial.request_id == str(uuid.UUID(bytes=theirs.bytes(16), version=4))
        assert trial.seed == theirs.randint(0, 2**31)
        assert list(trial.hparams) == sorted(hyperparameters)
