"""The columns of trials that reports set: best and latest validation, and steps."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from det_core.master.store import ingest, trials, validations
from det_core.master.store.models import Trial
from det_core.master.store.validations import Columns
from fast.master.store.conftest import add_trial


@pytest.fixture
def searching(session: Session) -> int:
    """Add a trial of a search for the smallest loss, both with the ID 1."""
    return add_search(session, "loss")


def add_search(session: Session, metric: str, *, smaller_is_better: bool = True) -> int:
    return add_trial(session, name="random", metric=metric, smaller_is_better=smaller_is_better)


def columns(session: Session, trial: int) -> Columns:
    row = session.execute(select(Trial.steps, Trial.latest_step, Trial.best_step, Trial.best).where(Trial.id == trial))
    return Columns(*row.one())


def report(session: Session, trial: int, run: int, step: int | None, group: str = "validation", **values: Any) -> None:
    ingest.report(session, trial, run, group, step, values)


@pytest.mark.parametrize(
    ("metric", "smaller", "best"), [("loss", True, (2, 1)), ("loss", False, (1, 3)), ("d.t", True, (5, -5))]
)
def test_columns_follow_reports(session: Session, metric: str, smaller: bool, best: tuple[int, float]) -> None:
    trial = add_search(session, metric, smaller_is_better=smaller)
    assert columns(session, trial) == Columns()
    for step, loss in [(1, 3.0), (2, 1.0), (3, "NaN"), (4, 1.0), (5, 2.0)]:
        report(session, trial, 1, step, loss=loss, d={"t": -step})
    report(session, trial, 1, 6, other=1, loss="text")
    report(session, trial, 1, 8, "training", loss=-9)
    report(session, trial, 1, None, loss=-9.0)
    assert columns(session, trial) == Columns(8, 6, *best)
    latest, shown = validations.latest_and_best(session, [trial, 7])
    assert [(row.steps_completed, row.metrics["loss"]) for row in latest.values()] == [(6, "text")]
    assert shown[trial].steps_completed == best[0]
    values = validations.of_trial(session, trial, "loss")
    assert [row.steps_completed for row, _ in values] == [1, 2, 3, 4, 5]


def test_nan_is_the_worst_of_validations(session: Session, searching: int) -> None:
    report(session, searching, 1, 1, loss="NaN")
    assert columns(session, searching) == Columns(1, 1, 1, None)
    (best,) = validations.best_trials(session, [1], smaller_is_better=True).values()
    assert best.trial_id == searching and math.isnan(best.value)
    report(session, searching, 1, 2, loss="Infinity")
    assert columns(session, searching) == Columns(2, 2, 2, math.inf)


def test_trials_are_ordered_by_their_best(session: Session, searching: int) -> None:
    ids = [searching] + [trials.create(session, 1, f"r{n}", state="ACTIVE", hparams={}).id for n in range(2, 7)]
    for trial, loss in zip(ids, [2.0, "NaN", None, 1.0, "NaN", 1.0], strict=True):
        if loss is not None:
            report(session, trial, 1, 1, loss=loss)
    order = {True: [4, 6, 1, 2, 5, 3], False: [1, 4, 6, 2, 5, 3]}
    for smaller, numbers in order.items():
        ordered = select(Trial.id).order_by(*validations.best_first(smaller))
        assert session.scalars(ordered.limit(4).offset(1)).all() == numbers[1:5]
        assert validations.best_trials(session, [1, 2], smaller_is_better=smaller)[1].trial_id == numbers[0]
    assert list(map(repr, validations.bests(session, 1).values())) == ["2.0", "nan", "1.0", "nan", "1.0"]


def test_best_trial_has_infinite_value_for_a_huge_integer() -> None:
    assert validations.number({"loss": 10**400}, "loss") == math.inf


def record(seq: int, step: int, loss: float) -> dict[str, Any]:
    metrics = {"kind": "metrics", "seq": seq, "time": 1.0, "group": "validation", "steps_completed": step}
    return {**metrics, "metrics": {"loss": loss}}


ROWS = st.tuples(st.integers(0, 6), st.sampled_from([1.0, 2.0, math.nan]), st.sampled_from(["validation", "own"]))
WRITERS = st.lists(
    st.tuples(st.none() | st.integers(0, 6), st.lists(ROWS, max_size=5), st.lists(ROWS, max_size=5)), max_size=4
)


@given(runs=WRITERS, reports=st.lists(st.tuples(st.integers(1, 4), ROWS), max_size=6), seed=st.integers(0, 2**16))
def test_columns_equal_those_computed_anew(scratch: Engine, runs: Any, reports: Any, seed: int) -> None:
    batches = []
    for run, (restored, *ranks) in enumerate(runs, start=1):
        for rank, rows in enumerate(ranks):
            records = [
                {**record(seq, step, loss), "group": group} for seq, (step, loss, group) in enumerate(rows, start=1)
            ]
            if restored is not None and rank == 0:
                records.insert(0, {"kind": "restore", "seq": 0, "time": 1.0, "body": {"steps_completed": restored}})
            batches += [(run, rank, records[:2]), (run, rank, records[1:])]
    batches += [(run, None, row) for run, row in reports]
    random.Random(seed).shuffle(batches)
    with Session(scratch) as session:
        trial = add_search(session, "loss")
        for run, rank, rows in batches:
            if rank is not None:
                ingest.insert_journal(session, trial, run, rank, rows)
                continue
            step, loss, group = rows
            try:
                report(session, trial, run, step, group, loss=loss)
            except ingest.StoreConflict:
                continue
        followed = columns(session, trial)
        assert followed == validations.compute(session, trial, "loss", smaller_is_better=True)
        session.rollback()
