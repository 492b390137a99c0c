"""Trials that fail, are invalid or end early; and searches that validations drive."""

from __future__ import annotations

from typing import Any

import pytest

from det_core.errors import SearchError
from det_core.search import (
    Close,
    Completed,
    Create,
    Exited,
    Progress,
    Shutdown,
    Started,
    Stop,
    TrainTo,
    Validated,
    create_search,
    simulate,
)

HALVING = {"name": "async_halving", "num_rungs": 3, "max_trials": 8, "divisor": 2, "max_length": 8}
TIMED = {**HALVING, "time_metric": "batches", "max_time": 8, "max_concurrent_trials": 2}
RANDOM = {"name": "random", "max_trials": 4, "max_length": 8, "max_concurrent_trials": 2}


@pytest.mark.parametrize(
    "searcher, total", [(RANDOM, 5), (HALVING, 9), (TIMED, 9), ({**HALVING, "stop_once": True}, 9)]
)
def test_trial_with_invalid_hyperparameters_is_replaced(searcher: Any, total: int) -> None:
    done = simulate(searcher, {}, 0, lambda hparams, length, number: "invalid_hp" if number == 1 else 1.0)
    assert len(done.trials) == total
    assert sum(trial.exited == "completed" for trial in done.trials) == total - 1


@pytest.mark.parametrize("searcher", [{"name": "single", "max_length": 8}, {"name": "grid", "max_length": 8}])
def test_trial_of_single_or_grid_is_not_replaced(searcher: Any) -> None:
    done = simulate(searcher, {}, 0, lambda *_: "invalid_hp", record=True)
    assert len(done.trials) == 1
    assert done.record[-1][1] == [Shutdown()]


@pytest.mark.parametrize("searcher", [RANDOM, HALVING, TIMED])
def test_search_of_invalid_hyperparameters_alone_ends(searcher: Any) -> None:
    assert 100 <= len(simulate(searcher, {}, 0, lambda *_: "invalid_hp").trials) <= 110


@pytest.mark.parametrize("reason, shutdown", [("errored", Shutdown(failure=True)), ("canceled", Shutdown(cancel=True))])
@pytest.mark.parametrize("searcher", [RANDOM, HALVING, TIMED, {"name": "single", "max_length": 3}])
def test_search_whose_trials_all_failed_or_were_canceled_says_so(
    searcher: Any, reason: Any, shutdown: Shutdown
) -> None:
    assert simulate(searcher, {}, 0, lambda *_: reason, record=True).record[-1][1] == [shutdown]


@pytest.mark.parametrize("searcher", [HALVING, TIMED, {**HALVING, "stop_once": True}])
def test_search_whose_scripts_exit_early_ends(searcher: Any) -> None:
    done = simulate(searcher, {}, 0, lambda hparams, length, number: "completed" if number % 2 else 1.0)
    assert len(done.trials) == 8


def test_halving_promotes_next_trial_when_parked_one_exited() -> None:
    search = create_search({**HALVING, "max_trials": 4, "max_concurrent_trials": 4}, {}, 0)
    a, b, c, d = names(search.handle(Started()))
    assert search.handle(Completed(a, 2, 1.0)) == []
    assert search.handle(Exited(a, "canceled")) == []
    assert search.handle(Completed(b, 2, 5.0)) == []  # would promote a, which counts as the worst of the next rung
    assert search.handle(Completed(c, 2, 3.0)) == []
    assert search.handle(Completed(d, 2, 4.0)) == [TrainTo(c, 4), Close(d), Close(b)]
    assert search.rungs()[0]["rungs"][1]["entries"] == [{"request_id": a, "metric": None, "state": "exited"}]


def test_score_of_nan_is_worst() -> None:
    searcher = {**HALVING, "max_trials": 4, "max_concurrent_trials": 4, "smaller_is_better": False}
    search = create_search(searcher, {}, 0)
    a, b, c, d = names(search.handle(Started()))
    search.handle(Completed(a, 2, float("nan")))
    assert search.handle(Completed(b, 2, -7.0)) == [TrainTo(b, 4)]
    assert search.handle(Completed(c, 2, float("-inf"))) == []
    assert search.handle(Completed(d, 2, float("inf"))) == [TrainTo(d, 4), Close(a), Close(c)]
    assert [entry["request_id"] for entry in search.rungs()[0]["rungs"][0]["entries"]] == [d, b, a, c]


def test_stopped_trial_is_not_counted_again() -> None:
    search = create_search(TIMED, {}, 0)
    actions = search.handle(Started())
    a, b = names(actions)
    assert TrainTo(a, 8) in actions
    assert search.handle(Validated(a, 1, 1.0)) == []
    assert search.handle(Validated(a, 2, 1.0)) == []
    assert search.handle(Validated(a, 2, 1.0)) == [], "a report that is repeated after a restart"
    assert search.handle(Validated(a, 1, 1.0)) == []
    stop, new, _ = search.handle(Validated(b, 3, 2.0))
    assert (stop, type(new)) == (Stop(b), Create)
    entries = search.rungs()
    assert search.handle(Validated(b, 4, 0.0)) == []
    assert search.handle(Completed(b, 8, 0.0)) == []
    assert search.rungs() == entries
    assert search.handle(Exited(b, "completed")) == []


def test_validation_may_pass_several_rungs() -> None:
    search = create_search(TIMED, {}, 0)
    _, b = names(search.handle(Started()))
    assert search.handle(Validated(b, 5, 3.0)) == []
    assert [len(rung["entries"]) for rung in search.rungs()[0]["rungs"]] == [1, 1, 0]
    stop, *_ = search.handle(Completed(b, 8, 3.0))
    assert stop == Stop(b)


def test_progress_grows_to_one() -> None:
    search = create_search(RANDOM, {}, 0)
    a, _ = names(search.handle(Started()))
    assert search.progress() == 0.0
    assert search.handle(Progress(a, 4)) == []
    assert search.progress() == pytest.approx(0.125)
    search.handle(Completed(a, 8, 1.0))
    search.handle(Exited(a, "completed"))
    assert search.progress() == pytest.approx(0.25)


def test_search_with_impossible_event_raises() -> None:
    search = create_search(RANDOM, {}, 0)
    a, _ = names(search.handle(Started()))
    with pytest.raises(SearchError, match="no trial nobody"):
        search.handle(Completed("nobody", 8, 1.0))
    with pytest.raises(SearchError, match=f"trial {a} completed length 9: expected 8"):
        search.handle(Completed(a, 9, 1.0))
    with pytest.raises(SearchError, match=r"searcher.name='hyperband': expected one of adaptive_asha, "):
        create_search({"name": "hyperband"}, {}, 0)


def names(actions: list[Any]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Create)]
