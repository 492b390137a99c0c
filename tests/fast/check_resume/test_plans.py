"""Moments to stop and to kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core.check_resume._plans import end_plan, kill_plan, stop_plan
from det_core.check_resume._records import Rows, Save, Training
from det_core.check_resume._trainings import Start


def training(
    steps: range,
    saves: tuple[int, ...],
    *,
    calls_per_row: int = 1,
    validations: range = range(0),
    passes: range = range(0),
    ranks: int = 1,
) -> Training:
    """Return an undisturbed training with a row at each step."""
    rows: Rows = {"training": {step: {} for step in steps}}
    if validations:
        rows["validation"] = {step: {} for step in validations}
    made = [
        Save(str(step), 0, step, step, calls_per_row * (list(steps).index(step) + 1), step, Path()) for step in saves
    ]
    start = Start(0, 1.0, notes={0: [{"event": "pass", "step": step} for step in passes]})
    return Training("undisturbed", (start,), sizes=(ranks,), rows=rows, saves=tuple(made))


def test_stop_keeps_away_from_checkpoints_and_validations() -> None:
    undisturbed = training(range(1, 31), (10, 20, 30), validations=range(4, 31, 4))
    assert stop_plan(undisturbed, None) == {"stop_at": 13, "stop_after_calls": 0}


def test_stop_falls_between_two_reports_where_there_are_calls() -> None:
    undisturbed = training(range(10, 310, 10), (100, 200, 300), calls_per_row=10)
    assert stop_plan(undisturbed, None)["stop_after_calls"] == 5


def test_kill_is_in_the_middle_between_two_checkpoints() -> None:
    assert kill_plan(training(range(1, 41), (10, 20, 30, 40)), None) == {"kill_at": 15}


@pytest.mark.parametrize("saves", [(), (40,)])
def test_kill_without_two_checkpoints_is_after_two_fifths(saves: tuple[int, ...]) -> None:
    assert kill_plan(training(range(1, 41), saves), None) == {"kill_at": 17}


@pytest.mark.parametrize("length", [2, 3])
def test_plan_of_a_short_training_is_one_of_its_steps(length: int) -> None:
    undisturbed = training(range(1, length + 1), tuple(range(1, length + 1)))
    assert 1 <= stop_plan(undisturbed, None)["stop_at"] <= length
    assert 1 <= kill_plan(undisturbed, None)["kill_at"] <= length


def test_stop_of_a_training_with_one_report_is_after_two_fifths_of_its_calls() -> None:
    undisturbed = training(range(20, 21), (20,), calls_per_row=20)
    assert stop_plan(undisturbed, None) == {"stop_at": -1, "stop_after_calls": 8}
    assert kill_plan(undisturbed, None) == {"kill_at": 20}


def test_given_step_is_taken_for_both() -> None:
    undisturbed = training(range(1, 31), (10, 20, 30), calls_per_row=4)
    assert stop_plan(undisturbed, 7) == {"stop_at": 7}
    assert kill_plan(undisturbed, 7) == {"kill_at": 7}


@pytest.mark.parametrize("at", [0, 30, 31])
def test_given_step_outside_of_the_training_is_an_error(at: int) -> None:
    with pytest.raises(ValueError, match=rf"--at {at}: expected at least 1 and less than 30"):
        stop_plan(training(range(1, 31), ()), at)


@pytest.mark.parametrize("seen_by", ["validations", "passes"])
def test_end_plan_is_the_last_batch_of_an_epoch_that_the_record_shows(seen_by: str) -> None:
    undisturbed = training(range(1, 41), (40,), **{seen_by: range(8, 41, 8)})
    assert end_plan(undisturbed) == {"stop_at": 16, "stop_after_calls": 0}
    assert stop_plan(undisturbed, None)["stop_at"] not in range(8, 41, 8)


@pytest.mark.parametrize(
    ("undisturbed", "plan"),
    [
        (training(range(10, 110, 10), (100,), calls_per_row=10, validations=range(35, 101, 35)), (30, 5)),
        (training(range(1, 5), (4,), calls_per_row=8, validations=range(1, 5)), (1, 7)),
        (training(range(1, 5), (4,), calls_per_row=8, validations=range(1, 2)), (1, 0)),
        (training(range(1, 41), (40,), validations=range(8, 41, 8), ranks=2), (15, 0)),
        (training(range(1, 4), (3,), calls_per_row=8, validations=range(1, 4), ranks=2), (1, 6)),
    ],
    ids=["rows of ten batches", "row an epoch", "one validation", "two ranks", "row an epoch on two ranks"],
)
def test_end_plan_counts_calls_from_the_report_before(undisturbed: Training, plan: tuple[int, int]) -> None:
    assert end_plan(undisturbed) == {"stop_at": plan[0], "stop_after_calls": plan[1]}


@pytest.mark.parametrize(
    "undisturbed",
    [training(range(1, 31), (10, 20, 30)), training(range(1, 5), (2, 4), validations=range(1, 5))],
    ids=["no epochs", "only whole epochs are seen"],
)
def test_end_plan_without_batches_within_epochs_is_none(undisturbed: Training) -> None:
    assert end_plan(undisturbed) is None


def test_stop_of_several_ranks_is_requested_a_call_earlier() -> None:
    assert stop_plan(training(range(1, 31), (10, 20, 30), ranks=2), None) == {"stop_at": 12, "stop_after_calls": 0}
