"""Records of a journal that somebody has sent: checked, and with their numbers that are not finite."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import orjson

from det_core._json import restore
from det_core.master.store._reports import NO_STEP
from det_core.master.store._types import dumps


def checked(record: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The record, its numbers restored.

    Args:
        record: as it stands in a journal's file.
        number: its place among those that were sent, for the message.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"record {number}: a record must be an object, not {record!r:.80}")
    trouble = _trouble(record)
    if trouble is not None:
        raise ValueError(f"record {number}: {trouble}")
    if "nonfinite" not in record:
        return record
    restored = copy.deepcopy(dict(record))
    if not restore(restored, restored["nonfinite"]):
        raise ValueError(f"record {number}: nonfinite is {record['nonfinite']!r:.200}, which leads nowhere")
    return restored


def json_text(value: Any) -> str:
    """``value`` as JSON, by orjson where that writes it whole."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # more than 64 bits, half a surrogate pair
        return dumps(value)
    return dumps(value) if b"null" in text else text.decode()  # NaN is null to orjson


def group_trouble(group: Any) -> str | None:
    """Why ``group`` cannot name a metric group; None if it can."""
    if type(group) is not str or not group or "." in group or "\0" in group or not _encodes(group):
        return f"group must be a non-empty name without '.', not {group!r:.80}"
    return None


def step_trouble(step: Any) -> str | None:
    """Why ``step`` cannot be a step; None if it can."""
    if step is not None and not (type(step) is int and 0 <= step < NO_STEP):
        return f"steps_completed must be a whole number from 0 to below 2**63 - 1, or null, not {step!r:.80}"
    return None


def _trouble(record: Mapping[str, Any]) -> str | None:
    kind, seq, time = record.get("kind"), record.get("seq"), record.get("time")
    if type(kind) is not str:
        return f"kind must be a string, not {kind!r:.80}"
    if kind == "journal":
        return None
    if type(seq) is not int or not 0 <= seq < NO_STEP:
        return f"seq must be a whole number from 0 to below 2**63 - 1, not {seq!r:.80}"
    if not isinstance(time, float | int) or isinstance(time, bool) or not abs(time) < 2**53:
        return f"time must be seconds since the epoch, not {time!r:.80}"
    if kind != "metrics":
        body = record.get("body")
        return None if isinstance(body, dict) else f"body must be an object, not {body!r:.80}"
    metrics, batches = record.get("metrics"), record.get("batch_metrics")
    if type(metrics) is not dict:
        return f"metrics must be an object, not {metrics!r:.80}"
    if type(batches) is not list and batches is not None:
        return f"batch_metrics must be a list, not {batches!r:.80}"
    if "steps_completed" not in record:
        return "steps_completed is missing"
    return group_trouble(record.get("group")) or step_trouble(record["steps_completed"])


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
