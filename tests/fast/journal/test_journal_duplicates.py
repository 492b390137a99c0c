"""One value for a group, step and key: exact among a group's newest rows; readers list what differs further back."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.journal import read_run
from support.journals import failing, lines, open_journal, same, written


def test_repeated_equal_value_is_written_once(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for _ in range(3):
        journal.metrics("training", 1, {"a": 1.0, "b": math.nan, "c": [math.inf]})
    before = lines(tmp_path)
    journal.metrics("training", 1, {"b": float("nan")})
    assert lines(tmp_path) == before
    journal.metrics("training", 1, {"a": 1, "d": math.nan})
    journal.close()
    assert same(written(tmp_path), {1: {"a": 1.0, "b": math.nan, "c": [math.inf], "d": math.nan}})
    assert b'"a"' not in lines(tmp_path)[-1]


def test_repeated_step_with_another_value_is_rejected_with_its_place(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"loss": 0.5})
    journal.metrics("training", 2, {"loss": 0.25})
    before = lines(tmp_path)
    for step, was in ((1, "0.5"), (2, "0.25")):
        with pytest.raises(
            ValueError, match=rf"group 'training', step {step}, key 'loss' changed from {was} to 7"
        ) as e:
            journal.metrics("training", step, {"new": 1, "loss": 7})
        assert "reported values are immutable" in str(e.value)
    assert lines(tmp_path) == before
    journal.metrics("validation", 1, {"loss": 7})
    journal.close()
    assert written(tmp_path) == {1: {"loss": 0.5}, 2: {"loss": 0.25}}


@pytest.mark.parametrize(
    ("one", "other"), [("NaN", math.nan), (math.inf, "Infinity"), (1, "1"), (1, True), ([1], [2]), ({}, None)]
)
def test_string_and_number_of_equal_text_differ(tmp_path: Path, one: Any, other: Any) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": one})
    with pytest.raises(ValueError, match="step 1, key 'a'"):
        journal.metrics("training", 1, {"a": other})
    journal.close()


def test_rows_without_a_step_may_repeat(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for value in (1, 2, 2):
        journal.metrics("cpu", None, {"a": value})
    journal.close()
    assert [row.metrics["a"] for row in read_run(tmp_path).rows("cpu")] == [1, 2, 2]


def test_second_batch_metrics_of_a_step_are_rejected(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": 1})
    journal.metrics("training", 1, {"a": 1}, [{"x": 1}])
    journal.metrics("training", 1, {"a": 1}, [{"x": 1}])
    with pytest.raises(ValueError, match="step 1, batch_metrics"):
        journal.metrics("training", 1, {"a": 1}, [{"x": 2}])
    journal.close()
    (row,) = read_run(tmp_path).rows("training", batches=True)
    assert (row.metrics, row.batch_metrics) == ({"a": 1}, [{"x": 1}])
    assert len(lines(tmp_path)) == 3


report = st.tuples(
    st.sampled_from(["training", "validation"]),
    st.integers(0, 12),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0, 1, 2.5, math.nan]), min_size=1),
)


@given(st.lists(report, max_size=60), st.integers(0, 40))
def test_repeated_steps_in_any_order_are_compared(reports: list[tuple[str, int, dict[str, Any]]], fail: int) -> None:
    """Against a dict of everything, with a failing write."""
    model: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        with failing(fail, part=fail % 2 == 0, only="write"):
            journal = open_journal(Path(name))
            for group, step, metrics in reports:
                known = model.get((group, step), {})
                if all(same(known[k], v) for k, v in metrics.items() if k in known):
                    journal.metrics(group, step, metrics)
                    model.setdefault((group, step), {}).update(metrics)
                else:
                    with pytest.raises(ValueError, match=f"group '{group}', step {step}, key"):
                        journal.metrics(group, step, metrics)
            journal.close()
        for group in {g for g, _ in model}:
            assert same(written(Path(name), group), {s: m for (g, s), m in sorted(model.items()) if g == group})


def test_other_value_beyond_cached_rows_becomes_a_conflict(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for step in range(0, 6000, 2):
        journal.metrics("training", step, {"a": step, "b": 1})
        if step % 1000 == 0:
            journal.metrics("validation", step, {"a": -step})
    for step in range(4000, 6000, 100):
        journal.metrics("training", step, {"a": step})
        with pytest.raises(ValueError, match=f"step {step}, key 'a' changed from {step}"):
            journal.metrics("training", step, {"a": -1})
        journal.metrics("training", step + 1, {"a": step})
    for step in range(0, 6000, 1000):
        with pytest.raises(ValueError, match=f"step {step}, key 'a'"):
            journal.metrics("validation", step, {"a": 1})
    journal.metrics("training", 10, {"a": -1, "b": 1, "c": 2})
    journal.metrics("training", 12, {"a": 12})
    journal.close()
    rows = {row.steps_completed: row for row in read_run(tmp_path).rows("training")}
    assert (rows[10].metrics, rows[10].conflicts) == ({"a": 10, "b": 1, "c": 2}, ("a",))
    assert (rows[12].metrics, rows[12].conflicts) == ({"a": 12, "b": 1}, ())
    assert list(rows) == sorted(rows) and len(rows) == 3000 + 20


def test_cache_of_huge_rows_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.journal._journal.MAX_CACHED_BYTES", 10_000)
    journal = open_journal(tmp_path)
    for step in range(100):
        journal.metrics("training", step, {"a": step, "text": "x" * 1000})
    with pytest.raises(ValueError, match="step 95, key 'a'"):
        journal.metrics("training", 95, {"a": 1})
    journal.metrics("training", 50, {"a": 1})
    journal.close()
    assert [row.steps_completed for row in read_run(tmp_path).rows("training") if row.conflicts] == [50]


def test_batch_metrics_of_later_rows_are_kept_and_compared(tmp_path: Path) -> None:
    """Rows after the first go a quicker way, if they are plain JSON."""
    numpy = pytest.importorskip("numpy")
    journal = open_journal(tmp_path)
    given: list[list[dict[str, Any]]] = [
        [{"x": 0.5}], [{"x": 1.5, "accuracy": 1}, {}], [], [{"x": float("nan"), "u": None}], [{"x": numpy.float32(2)}],
    ]  # fmt: skip
    for step, batches in enumerate(given, 1):
        for _ in range(2):
            journal.metrics("training", step, {"a": step}, batches)
    with pytest.raises(ValueError, match="step 2, batch_metrics"):
        journal.metrics("training", 2, {}, [{"x": 9}])
    with pytest.raises(TypeError, match=r"batch_metrics\[1\] must be a dict, not int"):
        journal.metrics("training", 9, {}, [{}, 3])  # type: ignore[list-item]
    journal.close()
    rows = read_run(tmp_path).rows("training", batches=True)
    assert [repr(row.batch_metrics) for row in rows] == [
        "[{'x': 0.5}]", "[{'x': 1.5, 'accuracy': 1}, {}]", "[]", "[{'x': nan, 'u': None}]", "[{'x': 2.0}]",
    ]  # fmt: skip
