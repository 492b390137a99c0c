"""Records of the master as the wire protocol's JSON, and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args, get_type_hints

import pytest

from det_core.protocol.records import (
    CheckpointView,
    ExperimentView,
    LogView,
    MetricView,
    SearchView,
    StartView,
    TrialView,
    ValidationView,
)
from det_core.protocol.wire import decode, encode, from_wire, seconds

VALUES: dict[Any, Any] = {Any: 3, str: "text", int: 7, float: 1.5, bool: True, list: ["a"], dict: {"a": 1}}


def filled(kind: Any) -> Any:
    """Return a record with a value in each field."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        of = (
            next((arg for arg in get_args(hint) if arg is not type(None)), hint)
            if type(None) in get_args(hint)
            else hint
        )
        plain = getattr(of, "__origin__", of)
        values[name] = filled(plain) if dataclasses.is_dataclass(plain) else VALUES[plain]
    return kind(**values)


KINDS = [CheckpointView, ExperimentView, LogView, MetricView, SearchView, StartView, TrialView, ValidationView]


@pytest.mark.parametrize("kind", KINDS)
def test_decode_is_the_inverse_of_encode_for_every_field(kind: Any) -> None:
    record = filled(kind)
    assert decode(kind, encode(record)) == record


def test_fields_are_where_clients_of_the_contract_expect_them() -> None:
    best = ValidationView(total_batches=2, metrics={"loss": 0.5}, metric=0.5, end_time=1.5, trial_run_id=1)
    trial = encode(TrialView(id=1, experiment_id=2, state="ACTIVE", operation_length=1 << 40, best_validation=best))
    assert (trial["state"], trial["operationLength"], trial["totalBatchesProcessed"]) == (
        "STATE_ACTIVE",
        str(1 << 40),
        0,
    )
    assert "latestValidation" not in trial
    assert trial["bestValidation"] == {
        "totalBatches": 2,
        "metrics": {"avgMetrics": {"loss": 0.5}},
        "searcherMetric": 0.5,
        "endTime": "1970-01-01T00:00:01.500000+00:00",
        "trialRunId": 1,
    }
    checkpoint = encode(CheckpointView(uuid="a", state="COMPLETED", size=3, resources={"state": 3}, trial_id=1))
    assert (checkpoint["size"], checkpoint["resources"]) == ("3", {"state": "3"})
    assert checkpoint["training"]["trialId"] == 1 and checkpoint["training"]["validationMetrics"] == {"avgMetrics": {}}


def test_decode_fills_what_another_version_leaves_out_and_ignores_what_it_adds() -> None:
    record = decode(ExperimentView, {"id": 3, "state": "STATE_ACTIVE", "bestTrialSearcherMetric": "Infinity", "new": 1})
    assert (record.id, record.state, record.progress) == (3, "ACTIVE", 0.0)
    assert record.best_metric == math.inf


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
