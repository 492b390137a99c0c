"""Objects of answers as dictionaries."""

from __future__ import annotations

import pytest

from det_core.protocol.wire import from_wire, seconds


def test_from_wire_renames_and_converts_by_key_and_leaves_data_of_users() -> None:
    value = {
        "id": 7,
        "searcherMetric": 0.5,
        "state": "STATE_ACTIVE",
        "endTime": "1970-01-01T00:00:01.500000+00:00",
        "size": "1099511627776",
        "hparams": {"learningRate": None, "state": "STATE_OF_MIND"},
    }
    assert from_wire(value) == {
        "id": 7,
        "searcher_metric": 0.5,
        "state": "ACTIVE",
        "end_time": 1.5,
        "size": "1099511627776",
        "hparams": {"learningRate": None, "state": "STATE_OF_MIND"},
    }


def test_from_wire_reads_times_of_other_masters() -> None:
    assert from_wire({"startTime": "1970-01-01T00:00:01.5Z", "endTime": ""}) == {"start_time": 1.5, "end_time": None}
    assert seconds("1970-01-01T01:00:00+01:00") == 0.0
    assert seconds("1970-01-01T00:00:00.123456789Z") == pytest.approx(0.123456)
    assert seconds(3) == 3.0
