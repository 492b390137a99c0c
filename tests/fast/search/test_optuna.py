"""Searches by Optuna's samplers: proposals, learning, recovery."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from det_core.errors import MissingExtra
from det_core.search import create_search, simulate

pytest.importorskip("optuna")

SPACE = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "opt": {
        "decay": {"type": "double", "minval": 0, "maxval": 0.5},
        "layers": {"type": "int", "minval": 1, "maxval": 8},
    },
    "act": {"type": "categorical", "vals": ["relu", [1, 2]]},
    "fixed": {"type": "const", "val": [3]},
}


def objective(hparams: Any, length: int, number: int) -> Any:
    if number in (4, 9):
        return ("errored", "invalid_hp")[number == 9]
    return (hparams["lr"] - 0.01) ** 2 + hparams["opt"]["decay"]


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "qmc", "nsgaii", "random"])
def test_optuna_recovered_proposes_the_same(sampler: str) -> None:
    pytest.importorskip("cmaes" if sampler == "cmaes" else "optuna")
    searcher = {"name": "optuna", "sampler": sampler, "max_trials": 14, "max_length": 2, "max_concurrent_trials": 3}
    record = simulate(searcher, SPACE, 3, objective, record=True).record
    assert simulate(searcher, SPACE, 3, objective, record=True).record == record
    at = len(record) // 2
    applied = create_search(searcher, SPACE, 3)
    for event, actions in record[:at]:
        applied.apply(event, actions)
    for event, actions in record[at:]:
        assert applied.handle(event) == actions


def test_optuna_recovered_tells_true_from_1() -> None:
    searcher = {
        "name": "optuna", "sampler": "tpe", "sampler_options": {"n_startup_trials": 8}, "max_trials": 30,
        "max_length": 1, "max_concurrent_trials": 1,
    }  # fmt: skip
    space = {"flag": {"type": "categorical", "vals": [1, True]}}
    record = simulate(searcher, space, 3, lambda h, length, number: float(h["flag"] is True), record=True).record
    applied = create_search(searcher, space, 3)
    for event, actions in record[:30]:
        applied.apply(event, actions)
    for event, actions in record[30:]:
        assert repr(applied.handle(event)) == repr(actions)


def test_optuna_proposes_better_than_random() -> None:
    searcher = {"name": "optuna", "sampler": "tpe", "max_trials": 30, "max_length": 1, "max_concurrent_trials": 1}
    space = {"x": {"type": "double", "minval": -10, "maxval": 10}}
    done = simulate(searcher, space, 1, lambda hparams, length, number: -abs(hparams["x"] - 3))
    first, last = ([abs(t.hparams["x"] - 3) for t in part] for part in (done.trials[:10], done.trials[-10:]))
    assert sum(last) > sum(first), "it goes away from where the metric is large, for smaller is better"
    best = simulate({**searcher, "smaller_is_better": False}, space, 1, lambda h, length, number: -abs(h["x"] - 3))
    assert sum(abs(t.hparams["x"] - 3) for t in best.trials[-10:]) < sum(first)


def test_optuna_sampler_changed_since_keeps_recorded_decisions() -> None:
    searcher = {"name": "optuna", "max_length": 2, "max_trials": 4, "max_concurrent_trials": 1}
    record = simulate({**searcher, "sampler": "random"}, SPACE, 3, objective, record=True).record
    for sampler in ("tpe", "cmaes"):
        search = create_search({**searcher, "sampler": sampler, "sampler_options": {"n_startup_trials": 1}}, SPACE, 4)
        for event, actions in record[:-1]:
            search.apply(event, actions)
        assert search.handle(record[-1][0]) == record[-1][1]


def test_optuna_with_invalid_options_is_rejected() -> None:
    searcher = {"name": "optuna", "sampler": "tpe", "max_trials": 1, "sampler_options": {"wrong": 1}}
    with pytest.raises(ValueError, match=r"searcher\.sampler_options: .*wrong"):
        create_search(searcher, SPACE, 0)


def test_optuna_not_installed_raises_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[optuna\]'"):
        create_search({"name": "optuna", "max_trials": 1}, SPACE, 0)
