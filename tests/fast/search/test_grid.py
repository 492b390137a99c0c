"""Grids of the wire contract 11.2, and hyperparameters that are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from det_core.search import create_search, simulate


def values(**spec: Any) -> list[Any]:
    """Return the grid of one hyperparameter, the first value first."""
    done = simulate({"name": "grid", "max_length": 1}, {"x": spec}, 0, lambda *_: 1.0)
    return [trial.hparams["x"] for trial in reversed(done.trials)]


def test_grid_axis_has_values_of_contract() -> None:
    assert values(type="int", minval=1, maxval=10, count=4) == [1, 4, 7, 10]
    assert values(type="int", minval=1, maxval=3, count=9) == [1, 2, 3]
    assert values(type="int", minval=0, maxval=5, count=3) == [0, 3, 5]
    assert values(type="int", minval=-5, maxval=0, count=3) == [-5, -3, 0]
    assert values(type="int", minval=0, maxval=4, count=1) == [2]
    assert values(type="double", minval=0.0, maxval=1.0, count=3) == [0.0, 0.5, 1.0]
    assert values(type="double", minval=0.0, maxval=3.0, count=1) == [1.5]
    assert values(type="log", base=10, minval=-3, maxval=-1, count=3) == pytest.approx([0.001, 0.01, 0.1])
    assert values(type="categorical", vals=["b", "a"]) == ["b", "a"]
    assert values(type="const", val=None) == [None]


def test_grid_starts_with_last_combination() -> None:
    space = {
        "b": {"type": "categorical", "vals": [1, 2]},
        "a": {"inner": {"type": "categorical", "vals": ["x", "y"]}, "fixed": [0]},
    }
    done = simulate({"name": "grid", "max_length": 1, "max_concurrent_trials": 1}, space, 0, lambda *_: 1.0)
    found = [(trial.hparams["a"]["inner"], trial.hparams["b"]) for trial in done.trials]
    assert found == [("y", 2), ("y", 1), ("x", 2), ("x", 1)]
    done.trials[0].hparams["a"]["fixed"].append(1)
    assert done.trials[1].hparams["a"]["fixed"] == [0], "trials share a list"


def test_grid_of_huge_size_is_computed_on_access() -> None:
    space = {name: {"type": "double", "minval": 0, "maxval": 1, "count": 1000} for name in "abcdef"}
    assert create_search({"name": "grid", "max_length": 1}, space, 0).progress() == 0.0


@pytest.mark.parametrize(
    "spec, told",
    [
        ({"type": "double", "minval": 0, "maxval": 1}, "opt.lr: a grid needs `count`"),
        ({"type": "int", "minval": 0, "maxval": 1, "count": 0}, "opt.lr: count must be at least 1"),
        ({"type": "int", "minval": 1, "maxval": 1, "count": 1}, "opt.lr: minval 1 must be less than maxval 1"),
        ({"type": "categorical", "vals": []}, "opt.lr: vals is empty"),
        ({"type": "log", "base": 0, "minval": 0, "maxval": 1, "count": 2}, "opt.lr: base must be positive"),
        ({"type": "log", "minval": 0, "maxval": 1, "count": 2}, "opt.lr: base is missing"),
        ({"type": "normal"}, "opt.lr: unknown type 'normal'"),
    ],
)
def test_grid_of_invalid_hyperparameter_is_rejected(spec: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"hyperparameters.{told}"):
        create_search({"name": "grid", "max_length": 1}, {"opt": {"lr": spec}}, 0)
