"""Rows of two trainings."""

from __future__ import annotations

import math

import pytest

from det_core.check_resume._compare import Change, compare, is_time
from det_core.check_resume._records import Rows, Training, flatten


def training(rows: Rows, order: tuple[tuple[str, int], ...] | None = None) -> Training:
    """Return a training with these rows, reported in their order."""
    if order is None:
        order = tuple((group, step) for group, of_group in rows.items() for step in of_group)
    return Training("training", (), rows=rows, order=order)


def test_compare_of_equal_rows_with_nan_is_empty() -> None:
    rows: Rows = {"training": {1: {"loss": math.nan, "seconds": 1.0}, 2: {"loss": 0.5}}}
    other: Rows = {"training": {1: {"loss": math.nan, "seconds": 9.0}, 2: {"loss": 0.5}}}
    assert not compare(training(rows), training(other))


def test_compare_lists_changes_by_step_missing_and_extra_rows() -> None:
    before: Rows = {"training": {1: {"loss": 1.0}, 2: {"loss": 0.5, "lr": 1}}, "validation": {2: {"error": 0.1}}}
    after: Rows = {"training": {2: {"loss": 0.25}, 3: {"loss": 0.1}}, "validation": {2: {"error": 0.1}}}
    difference = compare(training(before), training(after))
    assert difference.missing_of("training") == [1]
    assert difference.extra_of("training") == [3]
    assert difference.changed == (
        Change("training", 2, "loss", 0.5, 0.25),
        Change("training", 2, "lr", 1, None),
    )
    assert str(difference.changed[0]) == "training step 2: loss 0.25 instead of 0.5"


@pytest.mark.parametrize(("last", "is_equal"), [(4.0, True), (5.0, False)])
def test_compare_of_a_row_cut_in_two_goes_by_its_batches(last: float, is_equal: bool) -> None:
    whole = Training(
        "undisturbed", (), rows={"training": {3: {"loss": 2.0}}},
        batches={("training", 3): [{"loss": 1.0}, {"loss": 1.0}, {"loss": 4.0}]}, order=(("training", 3),),
    )  # fmt: skip
    cut = Training(
        "stopped", (), rows={"training": {2: {"loss": 1.0}, 3: {"loss": last}}},
        batches={("training", 2): [{"loss": 1.0}, {"loss": 1.0}], ("training", 3): [{"loss": last}]},
        order=(("training", 2), ("training", 3)),
    )  # fmt: skip
    assert bool(compare(whole, cut)) is not is_equal


def test_compare_finds_another_order() -> None:
    rows: Rows = {"training": {1: {}, 2: {}}, "validation": {1: {}}}
    before = training(rows, (("training", 1), ("validation", 1), ("training", 2)))
    after = training(rows, (("training", 1), ("training", 2), ("validation", 1)))
    difference = compare(before, after)
    assert difference.is_reordered
    assert not difference.changed


def test_compare_within_a_tolerance() -> None:
    before, after = training({"training": {1: {"loss": 1.0}}}), training({"training": {1: {"loss": 1.0 + 1e-7}}})
    assert compare(before, after)
    assert not compare(before, after, rtol=1e-6)


@pytest.mark.parametrize("key", ["time", "epoch_seconds", "samples_per_second", "step_time", "timing.ms", "elapsed_s"])
def test_key_of_a_time_is_not_compared(key: str) -> None:
    assert is_time(key)


@pytest.mark.parametrize("key", ["loss", "timesteps", "sentiment", "accuracy", "losses", "perplexity", "steps"])
def test_key_of_a_metric_is_compared(key: str) -> None:
    assert not is_time(key)


def test_flatten_gives_paths_of_nested_values() -> None:
    assert dict(flatten({"a": {"b": [1, 2]}, "c": {}})) == {"a.b.0": 1, "a.b.1": 2, "c": {}}
