"""The contract's own route (§5.2): rollback, merge, conflicts, and exact repeats."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from det_core.errors import StoreConflict
from det_core.master.store import ingest, series
from support.reported_series import REPORTS, TRIAL, check, shown


def test_another_value_is_a_conflict_and_nothing_of_it_is_kept(session: Session) -> None:
    ingest.report(session, TRIAL, 1, "training", 3, {"loss": 1.0})
    with pytest.raises(StoreConflict, match=r"trial 1, group training, step 3: loss changed from 1\.0 to 2\.0"):
        ingest.report(session, TRIAL, 1, "training", 3, {"accuracy": 0.5, "loss": 2.0})
    assert shown(session) == {3: {"loss": 1.0}}


def test_batch_metrics_cannot_be_overwritten_but_repeated(session: Session) -> None:
    batches = [{"loss": 1.0}, {"loss": "NaN"}]
    assert ingest.report(session, TRIAL, 1, "training", 3, {"loss": 1.0}, batches)
    assert not ingest.report(session, TRIAL, 1, "training", 3, {"loss": 1.0}, batches)
    with pytest.raises(StoreConflict, match="batch_metrics changed"):
        ingest.report(session, TRIAL, 1, "training", 3, {"loss": 1.0}, [{"loss": 2.0}])
    (row,) = series.read(session, TRIAL, "training", batches=True)
    assert row.batch_metrics is not None and math.isnan(row.batch_metrics[1]["loss"])


def test_words_for_numbers_that_are_not_finite_become_numbers(session: Session) -> None:
    words = {"a": "NaN", "b": "Nan", "c": "Infinity", "d": {"e": ["-Infinity", "nan"]}}
    assert ingest.report(session, TRIAL, 1, "validation", 1, words)
    assert not ingest.report(session, TRIAL, 1, "validation", 1, words)
    assert repr(shown(session, "validation")) == "{1: {'a': nan, 'b': nan, 'c': inf, 'd': {'e': [-inf, 'nan']}}}"


def test_a_later_run_takes_the_place_of_an_earlier_one_from_its_steps_on(session: Session) -> None:
    for step in range(1, 6):
        ingest.report(session, TRIAL, 1, "training", step, {"loss": 1.0})
    for step in (2, 4):
        ingest.report(session, TRIAL, 1, "validation", step, {"loss": 1.0})
    ingest.report(session, TRIAL, 1, "cpu", None, {"load": 1.0}, time=5.0)
    ingest.report(session, TRIAL, 2, "training", 4, {"loss": 2.0})
    assert shown(session) == {**{step: {"loss": 1.0} for step in (1, 2, 3)}, 4: {"loss": 2.0}}
    assert set(shown(session, "validation")) == {2, 4}  # beyond step 4 alone for other groups
    ingest.report(session, TRIAL, 2, "training", 3, {"loss": 2.0})
    assert set(shown(session)) == {1, 2, 3, 4}
    assert set(shown(session, "validation")) == {2}
    assert set(shown(session, "cpu")) == {None}


def test_samples_of_the_machine_are_kept_raw(session: Session) -> None:
    for load in (1.0, 1.0, 2.0):
        assert ingest.report(session, TRIAL, 1, "gpu", None, {"agent": {"load": load}})
    assert ingest.report(session, TRIAL, 1, "gpu", None, {"agent": {"load": 1.0}}, time=7.0)
    assert not ingest.report(session, TRIAL, 1, "gpu", None, {"agent": {"load": 1.0}}, time=7.0)
    assert ingest.report(session, TRIAL, 1, "gpu", 3, {"agent": {"load": 1.0}}, time=8.0)
    ingest.report(session, TRIAL, 2, "training", 0, {"loss": 1.0})
    rows = series.read(session, TRIAL, "gpu")
    assert [row.metrics["agent"]["load"] for row in rows] == [1.0, 1.0, 2.0, 1.0, 1.0]
    assert {row.steps_completed for row in rows} == {None}


@pytest.mark.parametrize(
    ("group", "step", "values", "said"),
    [
        ("", 1, {}, "group=.*: expected"),
        ("a.b", 1, {}, "group=.*: expected"),
        ("a", -1, {}, "steps_completed=.*: expected"),
        ("a", True, {}, "steps_completed=.*: expected"),
        ("a", 1, {"epoch": "one"}, "metrics.epoch=.*: expected a number"),
        ("a", 1, {"epochs": True}, "metrics.epochs=.*: expected a number"),
    ],
)
def test_what_is_no_report_is_refused(session: Session, group: str, step: int, values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ingest.report(session, TRIAL, 1, group, step, values)


@given(reports=REPORTS)
def test_it_does_as_the_contract_says(scratch: Engine, reports: Any) -> None:
    check(scratch, reports)
