"""Records of journals: each counts once, and the series are those that the journal's own reader gives."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from det_core.master.store import ingest, series
from support.journal_series import (
    CASES,
    TRIAL,
    check,
    other,
    row,
)


def steps(session: Session, group: str = "training", **options: Any) -> list[int | None]:
    return [r.steps_completed for r in series.read(session, TRIAL, group, **options)]


def test_records_are_kept_once_however_often_and_late_they_arrive(session: Session) -> None:
    records = [row(0, 1), other(1, "status", status="warm"), row(2, 2), other(3, "progress", fraction=0.5), row(4, 3)]
    for part in (records[2:], records, records + records):
        assert ingest.insert_journal(session, TRIAL, 1, 0, part) == 5
    assert steps(session) == [1, 2, 3]
    assert [(r.kind, r.body) for r in series.records(session, TRIAL)] == [
        ("status", {"status": "warm"}),
        ("progress", {"fraction": 0.5}),
    ]
    assert [r.seq for r in series.records(session, TRIAL, kind="progress", run_id=1)] == [3]
    assert series.records(session, TRIAL, run_id=2) == []
    assert series.summaries(session, TRIAL)["training"]["loss"]["count"] == 3


def test_a_record_twice_in_one_batch_counts_once(session: Session) -> None:
    assert ingest.insert_journal(session, TRIAL, 1, 0, [row(0, 1), row(0, 1), row(1, 2), row(0, 1)]) == 2
    assert steps(session) == [1, 2]


def test_what_each_process_writes_is_its_own(session: Session) -> None:
    for run, restart, rank in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]:
        assert ingest.insert_journal(session, TRIAL, run, rank, [other(0, "status", who=rank)], restart=restart) == 1
    assert ingest.insert_journal(session, 2, 1, 0, [other(0, "status")]) == 1
    assert [(r.run_id, r.restart, r.rank) for r in series.records(session, TRIAL)] == [
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (2, 0, 0),
    ]


def test_numbers_that_are_not_finite_come_back_as_numbers(session: Session) -> None:
    record = row(0, 1, loss="NaN", name="NaN", deep={"a": [1, "Infinity"]})
    record["nonfinite"] = [["metrics", "loss"], ["metrics", "deep", "a", 1], ["batch_metrics", 0, "x"]]
    record["batch_metrics"] = [{"x": "-Infinity", "y": "text"}]
    sent = orjson.dumps(record)
    ingest.insert_journal(session, TRIAL, 1, 0, [orjson.loads(sent)])
    (found,) = series.read(session, TRIAL, "training", batches=True)
    assert math.isnan(found.metrics.pop("loss"))
    assert found.metrics == {"name": "NaN", "deep": {"a": [1, math.inf]}}
    assert found.batch_metrics == [{"x": -math.inf, "y": "text"}]
    (plain,) = series.read(session, TRIAL, "training")
    assert plain.batch_metrics is None
    ingest.insert_journal(session, TRIAL, 2, 0, [row(0, 5, loss=1.0), row(1, 6, loss=math.nan, none=None)])
    assert repr(series.read(session, TRIAL, "training")[-1].metrics) == "{'loss': nan, 'none': None}"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (7, "expected an object"),
        ({}, "expected a string"),
        ({**row(0, 1), "seq": -1}, "seq=.*expected a whole number"),
        ({**row(0, 1), "seq": 2**63}, "seq=.*expected a whole number"),
        ({**row(0, 1), "seq": True}, "seq=.*expected a whole number"),
        ({**row(0, 1), "time": "now"}, "expected seconds"),
        ({**row(0, 1), "group": "a.b"}, "group=.*expected a non-empty name"),
        ({**row(0, 1), "group": "\ud800"}, "group=.*expected a non-empty name"),
        ({**row(0, 1), "group": ["a"]}, "group=.*expected a non-empty name"),
        ({**row(0, 1), "steps_completed": 1.5}, "steps_completed=.*expected"),
        ({**row(0, 1), "steps_completed": -1}, "steps_completed=.*expected"),
        ({k: v for k, v in row(0, 1).items() if k != "steps_completed"}, "steps_completed is missing"),
        ({**row(0, 1), "metrics": [1]}, "metrics=.*expected an object"),
        ({**row(0, 1), "batch_metrics": {}}, "batch_metrics=.*expected a list"),
        ({**row(0, 1), "nonfinite": [["metrics", "no"]]}, "expected paths"),
        ({"kind": "status", "seq": 0, "time": 1.0, "body": []}, "body=.*expected an object"),
    ],
)
def test_what_is_no_record_is_refused_with_its_number(session: Session, record: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^record 1: .*{said}"):
        ingest.insert_journal(session, TRIAL, 1, 0, [row(5, 5), record])


def test_a_files_first_line_is_passed_over(session: Session) -> None:
    header = {"kind": "journal", "version": 1, "run": "r", "restart": 0, "rank": 0}
    assert ingest.insert_journal(session, TRIAL, 1, 0, [header, row(0, 1)]) == 1
    assert steps(session) == [1]


def test_odd_values_come_back_as_they_were(session: Session) -> None:
    odd = {"big": 2**64 - 1, "text": "é\0\u2028", "none": None, "flag": True, "list": [], "deep": {"a": {"b": 1}}}
    ingest.insert_journal(session, TRIAL, 1, 0, [row(0, None, **odd), row(1, 0, half="\ud800", huge=10**40)])
    with_step, without = series.read(session, TRIAL, "training")
    assert without.metrics == odd
    assert with_step.metrics == {"half": "\ud800", "huge": 10**40}


def test_a_series_is_read_in_pages(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.master.store.series.CHUNK_ROWS", 7)
    rows = [row(i, i // 3) for i in range(60)] + [row(i, None) for i in range(60, 80)]
    ingest.insert_journal(session, TRIAL, 1, 0, [{**r, "metrics": {f"k{r['seq']}": 1}} for r in rows])
    ingest.insert_journal(session, TRIAL, 2, 0, [row(0, 15)])
    for superseded in (False, True):
        whole = series.read(session, TRIAL, "training", superseded=superseded, limit=None)
        assert len(whole) == (15 + 1 + 20 if not superseded else 21 + 20)
        paged: list[series.MetricRow] = []
        while page := series.read(
            session, TRIAL, "training", superseded=superseded, limit=4, after=paged[-1].cursor if paged else None
        ):
            assert len(page) <= 5
            paged += page
        assert paged == whole
    assert series.groups(session, TRIAL) == ["training"]
    assert series.read(session, 2**70, "training") == []


@given(**CASES)
def test_the_series_are_those_of_the_journals_own_reader(
    scratch: Engine, runs: Any, by_restart: bool, seed: int
) -> None:
    check(scratch, runs, by_restart, seed)
