"""Accepted values, and values that are rejected with the path of their key before anything is written."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from support.journals import lines, open_journal, same, written


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Word(str):
    pass


class Loss(float):
    pass


class Json:
    def __json__(self) -> Any:
        return {"x": math.inf}


class Shaped:
    """A scalar by its shape, of no dtype."""

    shape = ()


@dataclass
class Point:
    x: int = 1


ACCEPTED = [
    (True, True),
    (None, None),
    ("NaN", "NaN"),
    (Level.LOW, 1),
    (Color.RED, "red"),
    (Word("w"), "w"),
    (Loss(0.5), 0.5),
    (Loss("nan"), math.nan),
    ((1, 2), [1, 2]),
    (OrderedDict(a=1), {"a": 1}),
    (defaultdict(int, a=math.inf), {"a": math.inf}),
    (MappingProxyType({"a": 1}), {"a": 1}),
    ({1: 0.5}, {"1": 0.5}),
    ({np.int64(3): 0.5}, {"3": 0.5}),
    (b"caf\xc3\xa9", "café"),
    (datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc), "2026-01-02T03:04:05+00:00"),
    (date(2026, 1, 2), "2026-01-02"),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Json(), {"x": math.inf}),
    (np.float64(0.1), 0.1),
    (np.float32(0.5), 0.5),
    (np.float16(np.nan), math.nan),
    (np.longdouble(0.5), 0.5),
    (np.int8(-1), -1),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.bool_(True), True),
    (np.array([[1.0, -np.inf]]), [[1.0, -math.inf]]),
    (np.array(3), 3),
]


@pytest.mark.parametrize(
    ("value", "read"), ACCEPTED, ids=[f"{type(v).__name__}-{n}" for n, (v, _) in enumerate(ACCEPTED)]
)
def test_accepted_values_are_read_back(tmp_path: Path, value: Any, read: Any) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"v": value, "list": [value]})  # the careful path
    journal.metrics("training", 2, {"v": value, "list": [value]})  # what the fast one makes of it
    journal.metrics("training", 3, {}, [{"v": value}])
    journal.record("metadata", {"metadata": {"v": value}})
    journal.close()
    found = written(tmp_path)
    assert same(found[1], {"v": read, "list": [read]})
    assert same(found[2], found[1])


REFUSED = [
    ({"a": {1, 2}}, TypeError, r'metrics\["a"\]: a set cannot'),
    ({"a": {"b": [0, {"c": object()}]}}, TypeError, r'metrics\["a"\]\["b"\]\[1\]\["c"\]: an object cannot'),
    ({"a": Decimal("0.1")}, TypeError, r'metrics\["a"\]: a Decimal cannot'),
    ({"a": Point()}, TypeError, r'metrics\["a"\]: a Point cannot'),
    ({"a": [Shaped()]}, TypeError, r'metrics\["a"\]\[0\]: a Shaped cannot'),
    ({"a": 1j}, TypeError, r'metrics\["a"\]: a complex cannot'),
    ({"a": print}, TypeError, r'metrics\["a"\]: a builtin_function_or_method cannot'),
    ({"a": np.float32}, TypeError, r'metrics\["a"\]: a type cannot'),
    ({"a": np.array([1j])}, TypeError, r'metrics\["a"\]: a ndarray of complex128 cannot'),
    ({"a": np.array([object()])}, TypeError, r'metrics\["a"\]: a ndarray of object cannot'),
    ({"a": np.datetime64("2026-01-01")}, TypeError, r'metrics\["a"\]: a datetime64 of'),
    ({"a": 2**64}, ValueError, r'metrics\["a"\]: the integer 18446744073709551616… is beyond 64 bits'),
    ({"a": [-(2**63) - 1]}, ValueError, r'metrics\["a"\]\[0\]: the integer'),
    ({"a": "\ud800"}, ValueError, r'metrics\["a"\]: a string with a lone surrogate'),
    ({"\ud800": 1}, ValueError, r'metrics\["\\ud800"\]: a string with a lone surrogate'),
    ({"a": b"\xff"}, ValueError, r'metrics\["a"\]: these bytes are not UTF-8'),
    ({1.5: 1}, TypeError, r"metrics has the key 1.5, a float: keys must be str"),
    ({"a": {None: 1}}, TypeError, r'metrics\["a"\] has the key None'),
    ({True: 1}, TypeError, "metrics has the key True, a bool"),
    ({1: 1, "1": 2}, ValueError, "two keys that are '1' in JSON"),
    ([("a", 1)], TypeError, "metrics must be a dict, not a list"),
    (None, TypeError, "metrics must be a dict, not a NoneType"),
    (0.5, TypeError, "metrics must be a dict, not a float"),
]


@pytest.mark.parametrize(("metrics", "error", "message"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_value_beyond_json_is_rejected_by_its_path(
    tmp_path: Path, metrics: Any, error: type[Exception], message: str
) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(error, match=message):
        journal.metrics("training", 1, metrics)
    assert list(tmp_path.iterdir()) == []
    journal.metrics("training", 1, {"ok": 1})
    before = lines(tmp_path)
    with pytest.raises(error, match=message):
        journal.metrics("training", 2, metrics)
    with pytest.raises(error):
        journal.record("status", metrics)
    with pytest.raises(error):
        journal.metrics("training", 3, {"ok": 1}, [{"fine": 1}, metrics])
    assert lines(tmp_path) == before
    journal.metrics("training", 2, {"ok": 2})
    journal.close()
    assert written(tmp_path) == {1: {"ok": 1}, 2: {"ok": 2}}


def test_structure_that_contains_itself_is_rejected(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(ValueError, match=r'metrics\["a"\]\[0\]\["a"\]… is nested deeper than 200 levels'):
        journal.metrics("training", 1, loop)
    shared = [1]
    journal.metrics("training", 1, {"a": shared, "b": shared, "c": Word("x")})
    journal.close()
    assert written(tmp_path) == {1: {"a": [1], "b": [1], "c": "x"}}


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ("a.b", ValueError),
        ("", ValueError),
        (3, TypeError),
        (None, TypeError),
        (["a"], TypeError),
        ("\ud800", ValueError),
    ],
)
def test_invalid_group_name_is_rejected(tmp_path: Path, group: Any, error: type[Exception]) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(error, match="group"):
        journal.metrics(group, 1, {"a": 1})
    assert list(tmp_path.iterdir()) == []
    journal.close()


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (1.0, TypeError),
        (np.float64(1), TypeError),
        ("1", TypeError),
        (True, TypeError),
        (np.bool_(True), TypeError),
        ([1], TypeError),
        (-1, ValueError),
        (2**63, ValueError),
        (2**65, ValueError),
    ],
)
def test_steps_other_than_integers_are_rejected(tmp_path: Path, steps: Any, error: type[Exception]) -> None:
    journal = open_journal(tmp_path)
    for _ in range(2):
        with pytest.raises(error, match="steps_completed must be"):
            journal.metrics("training", steps, {"a": 1})
        journal.metrics("training", 0, {"a": 1})
    journal.close()
    assert written(tmp_path) == {0: {"a": 1}}


@pytest.mark.parametrize("steps", [np.int64(3), np.uint8(3), Level.LOW])
def test_integers_of_other_types_are_accepted_as_steps(tmp_path: Path, steps: Any) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", steps, {"a": 1})
    journal.close()
    assert written(tmp_path) == {int(steps): {"a": 1}}


def test_validation_metric_of_none_is_rejected(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r'metrics\["acc"\] is None'):
            journal.metrics("validation", 5, {"acc": None})
        journal.metrics("validation", 1, {"acc": 1.0})
        journal.metrics("training", 1, {"acc": None})
    journal.close()
    assert written(tmp_path, "validation") == {1: {"acc": 1.0}}


@pytest.mark.parametrize("batches", [{"a": 1}, "ab", 3, [1], [{"a": 1}, None]])
def test_batch_metrics_other_than_dicts_are_rejected(tmp_path: Path, batches: Any) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(TypeError, match="batch_metrics"):
        journal.metrics("training", 1, {"a": 1}, batches)
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_value_changed_after_the_report_keeps_its_row(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    array, nested = np.ones(2), {"a": [1]}
    for step in (1, 2):
        journal.metrics("training", step, {"array": array, "nested": nested})
        array[:] = 7
        nested["a"].append(2)
        array[:] = 1
        nested["a"].pop()
    journal.close()
    assert written(tmp_path) == {s: {"array": [1, 1], "nested": {"a": [1]}} for s in (1, 2)}


@pytest.mark.parametrize("group", ["training", "validation"])
def test_training_row_without_a_step_is_rejected(tmp_path: Path, group: str) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(TypeError, match="steps_completed must be an int, not NoneType: None"):
        journal.metrics(group, None, {"a": 1})
    assert list(tmp_path.iterdir()) == []
    journal.metrics("gpu", None, {"a": 1})
    journal.close()


def test_huge_array_is_rejected(tmp_path: Path) -> None:
    """It was written number by number, for minutes."""
    journal = open_journal(tmp_path)
    with pytest.raises(ValueError, match=r'metrics\["a"\] is an? .*ndarray of 10,001 elements.*its mean'):
        journal.metrics("training", 1, {"a": np.zeros(10_001)})
    with pytest.raises(ValueError, match=r'batch_metrics\[0\]\["b"\] is .* of 10,100 elements'):
        journal.metrics("training", 1, {}, [{"b": np.zeros((101, 100))}])
    journal.metrics("training", 1, {"a": np.zeros(10_000), "list": [0] * 20_000})
    journal.close()


def test_report_of_100000_keys_is_read_back(tmp_path: Path) -> None:
    metrics = {f"layer.{number}": number / 7 for number in range(100_000)}
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, metrics)
    journal.close()
    assert written(tmp_path)[1] == metrics
