"""Reports and the rows that are read back."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.journal import read_run
from support.journals import lines, open_journal, same, written

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["NaN", "Infinity", "null", "a.b"]
)
leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | text
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=8
)
reports = st.dictionaries(text, values, max_size=5)


@given(st.lists(st.tuples(reports, st.none() | st.lists(reports, max_size=3)), max_size=8))
def test_every_report_is_read_back_unchanged(given_rows: list[tuple[dict[str, Any], Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = open_journal(folder)
        for step, (metrics, batches) in enumerate(given_rows):
            journal.metrics("training", step, metrics, batches)
        journal.close()
        if not given_rows:
            return
        rows = read_run(folder).rows("training", batches=True)
        assert [row.steps_completed for row in rows] == list(range(len(given_rows)))
        for row, (metrics, batches) in zip(rows, given_rows, strict=True):
            assert same(row.metrics, metrics)
            assert same(row.batch_metrics, batches)


@given(reports)
def test_fast_and_slow_path_write_equal_lines(metrics: dict[str, Any]) -> None:
    class Report(dict[str, Any]):  # not exactly a dict: takes the careful path
        pass

    with tempfile.TemporaryDirectory() as name:
        journal = open_journal(Path(name))
        journal.metrics("training", 0, {})
        journal.metrics("training", 1, metrics)
        journal.metrics("training", 2, Report(metrics))
        journal.close()
        found = written(Path(name))
        assert same(found[1], found[2])


def test_floats_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    numbers = [0.1, -0.0, 5e-324, 1.7976931348623157e308, 2**53 + 1, 1 / 3, math.pi]
    journal = open_journal(tmp_path)
    for step, number in enumerate(numbers):
        journal.metrics("training", step, {"x": number})
    journal.close()
    found = written(tmp_path)
    assert [found[s]["x"] for s in range(len(numbers))] == numbers
    assert math.copysign(1, found[1]["x"]) == -1


def test_line_is_plain_json(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, trial_id=7)
    journal.metrics("training", 3, {"loss": 0.5, "bad": math.nan, "word": "NaN"})
    journal.record("status", {"status": "fit"})
    journal.close()
    header, row, status = map(orjson.loads, lines(tmp_path))
    assert {k: header[k] for k in ("kind", "run_id", "restart", "rank", "trial_id", "pid")} == {
        "kind": "journal",
        "run_id": "r",
        "restart": 0,
        "rank": 0,
        "trial_id": 7,
        "pid": os.getpid(),
    }
    assert row.pop("time") <= status.pop("time")
    assert row == {
        "kind": "metrics",
        "seq": 0,
        "group": "training",
        "steps_completed": 3,
        "metrics": {"loss": 0.5, "bad": "NaN", "word": "NaN"},
        "nonfinite": [["metrics", "bad"]],
    }
    assert status == {"kind": "status", "seq": 1, "body": {"status": "fit"}}


def test_journal_without_records_creates_no_file(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.flush()
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_second_journal_of_a_process_continues_its_numbers(tmp_path: Path) -> None:
    for word in ("a", "b"):
        journal = open_journal(tmp_path)
        journal.record("status", {"status": word})
        journal.close()
    assert [(r.seq, r["status"]) for r in read_run(tmp_path).records("status")] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("later", ["metrics", "record"])
def test_report_after_close_raises_context_closed(tmp_path: Path, later: str) -> None:
    from det_core.errors import ContextClosed

    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": 1})
    journal.close()
    journal.close()
    with pytest.raises(ContextClosed, match="closed"):
        journal.metrics("training", 2, {"a": 1}) if later == "metrics" else journal.record("status", {})
