"""Trial n draws from a generator of its own, seeded by the experiment's seed and n."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from det_core.search import Close, Completed, Create, Exited, SimulatedTrial, Started, create_search, simulate

SPACE = {
    "z": {"type": "double", "minval": 0.5, "maxval": 2},
    "a": {"type": "int", "minval": 3, "maxval": 5},
    "m": {"y": {"type": "categorical", "vals": ["p", "q", [1]]}, "b": {"type": "double", "minval": 0, "maxval": 1}},
    "k": {"type": "log", "base": 10, "minval": -5, "maxval": -1},
    "fixed": [1, 2],
}
SEEDS = st.integers(0, 2**32 - 1)


def drawn(seed: int, space: Any = SPACE, **searcher: Any) -> list[SimulatedTrial]:
    searcher = {"name": "random", "max_trials": 200, "max_length": 1, **searcher}
    return simulate(searcher, space, seed, lambda hparams, length, number: -number).trials


def test_draw_is_uniform_including_both_ends() -> None:
    found = [trial.hparams for trial in drawn(3)]
    assert {hparams["a"] for hparams in found} == {3, 4, 5}
    assert all(0.5 <= hparams["z"] <= 2 and 0 <= hparams["m"]["b"] <= 1 for hparams in found)
    exponents = sorted(math.log10(hparams["k"]) for hparams in found)
    assert exponents[0] >= -5 and exponents[-1] <= -1 and -3.4 < exponents[100] < -2.6
    assert [sum(h["m"]["y"] == value for h in found) > 40 for value in ("p", "q", [1])] == [True] * 3
    assert list(found[0]) == sorted(SPACE)


def test_trials_do_not_share_lists() -> None:
    found = [trial.hparams for trial in drawn(3)]
    lists = [h["fixed"] for h in found] + [h["m"]["y"] for h in found if h["m"]["y"] == [1]]
    assert len({id(one) for one in lists}) == len(lists)


@given(seed=SEEDS)
def test_trial_depends_on_seed_and_number_alone(seed: int) -> None:
    expected = [(t.request_id, t.hparams, t.seed) for t in drawn(seed, max_trials=12)]
    halving = {"name": "async_halving", "num_rungs": 2, "divisor": 2, "max_concurrent_trials": 2, "max_length": 8}
    assert [(t.request_id, t.hparams, t.seed) for t in drawn(seed, max_trials=12, **halving)] == expected
    search = create_search(
        {"name": "random", "max_trials": 3, "max_length": 1, "max_concurrent_trials": 2}, SPACE, seed
    )
    seen = [action for action in search.handle(Started()) if isinstance(action, Create)]
    search.handle(Completed(seen[1].request_id, 1, math.nan))
    seen += [a for a in search.handle(Exited(seen[1].request_id, "completed")) if isinstance(a, Create)]
    assert [(c.request_id, c.hparams, c.seed) for c in seen] == expected[:3]
    assert all(0 <= c.seed < 2**31 for c in seen)


@given(seed=SEEDS, other=SEEDS)
def test_trial_of_another_seed_differs(seed: int, other: int) -> None:
    ids = {trial.request_id for one in {seed, other} for trial in drawn(one, max_trials=20)}
    assert len(ids) == 20 * len({seed, other})


def test_trial_in_another_process_is_equal() -> None:
    code = (
        "from det_core.search import Started, create_search\n"
        f"search = create_search({{'name': 'random', 'max_trials': 2, 'max_length': 1}}, {SPACE!r}, 99)\n"
        "print(search.handle(Started()))"
    )
    here = create_search({"name": "random", "max_trials": 2, "max_length": 1}, SPACE, 99).handle(Started())
    assert isinstance(here[-1], Close)
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{here}\n"
