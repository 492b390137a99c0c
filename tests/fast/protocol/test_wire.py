"""Records as the wire protocol's JSON, and back."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.protocol.wire import from_wire, seconds, to_wire

WORDS = st.text(string.ascii_lowercase, min_size=1)
KEYS = st.lists(WORDS, min_size=1, max_size=3).map("_".join)
TIMES = st.integers(0, 4_000_000_000_000).map(lambda milliseconds: milliseconds / 1000)
VALUES = st.integers() | st.text() | st.dictionaries(st.text(), st.integers() | st.none())


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Return a record with a state, a time and other values, of which none is None."""
    others = st.dictionaries(KEYS.filter(lambda key: not key.endswith("_time")), VALUES)
    record = {key: value for key, value in draw(others).items() if key not in ("state", "timestamp", "size", "length")}
    record.pop("operation_length", None)
    return {**record, "state": draw(WORDS).upper(), "start_time": draw(TIMES), "timestamp": draw(TIMES)}


@given(records())
def test_from_wire_is_the_inverse_of_to_wire(record: dict[str, Any]) -> None:
    back = from_wire(to_wire(record))
    for key in ("start_time", "timestamp"):
        assert back.pop(key) == pytest.approx(record.pop(key), abs=1e-6)
    assert back == record


def test_to_wire_renames_and_converts_by_key() -> None:
    record = {
        "id": 7,
        "best_metric": 0.5,
        "state": "ACTIVE",
        "end_time": 1.5,
        "error": None,
        "size": 1 << 40,
        "hparams": {"learning_rate": None},
    }
    assert to_wire(record, best_metric="searcher_metric") == {
        "id": 7,
        "searcherMetric": 0.5,
        "state": "STATE_ACTIVE",
        "endTime": "1970-01-01T00:00:01.500000+00:00",
        "size": "1099511627776",
        "hparams": {"learning_rate": None},
    }
    assert to_wire({"id": 7}, text=("id",)) == {"id": "7"}


def test_from_wire_reads_times_of_other_masters() -> None:
    assert from_wire({"startTime": "1970-01-01T00:00:01.5Z", "endTime": ""}) == {"start_time": 1.5, "end_time": None}
    assert seconds("1970-01-01T01:00:00+01:00") == 0.0
    assert seconds("1970-01-01T00:00:00.123456789Z") == pytest.approx(0.123456)
    assert seconds(3) == 3.0
