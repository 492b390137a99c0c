"""The format of a journal: records as lines of JSON, and back.

A line is one object: ``kind``, ``seq`` (its place among the records of its process) and ``time`` (seconds since the
epoch), then for ``metrics`` the keys ``group``, ``steps_completed``, ``metrics`` and perhaps ``batch_metrics``, for
every other kind ``body``. Numbers that are not finite stand as the strings of the wire contract (§2.1), and the paths
to them in ``nonfinite``, each a list of keys and indices from the top of the record, so that they come back as numbers
and a user's string "NaN" stays a string. ``lost`` lists values that never came from their device. The first line of a
file has the kind ``journal`` and says whose records follow.

Others import this module where they first need it: it loads orjson, and ``from det_core import core`` loads nothing
but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from det_core._json import restore

VERSION = 1
FLAGS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
"""What orjson would write in a way of its own is refused instead, and goes through ``_values``."""
BATCH_METRICS = "\0batch_metrics"
"""Stands for the batch metrics among the keys of a row: they are given once a step, or not at all."""

dumps = orjson.dumps


def encode(record: Mapping[str, Any], nonfinite: Iterable[Iterable[str | int]] = ()) -> bytes:
    """The line of a record whose values are plain JSON.

    Args:
        record: numbers that are not finite stand as strings already.
        nonfinite: the paths to these.
    """
    paths = [list(path) for path in nonfinite]
    return dumps({**record, "nonfinite": paths} if paths else record, None, FLAGS)


def parse(line: bytes) -> dict[str, Any] | None:
    """The record on a line as it stands there, or None where the line is torn or no record of ours."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if type(record) is not dict or type(record.get("kind")) is not str:
        return None
    return record if record["kind"] == "journal" or _is_well_formed(record) else None


def decode(line: bytes) -> dict[str, Any] | None:
    """As :func:`parse`, with the numbers that are not finite as numbers."""
    record = parse(line)
    if record is None or record["kind"] == "journal":
        return record
    paths = record.pop("nonfinite", None)
    if paths is not None and not restore(record, paths):
        return None
    return record


def values_by_key(record: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a row by key, its batch metrics among them."""
    values: dict[str, Any] = dict(record["metrics"])
    if record.get("batch_metrics") is not None:
        values[BATCH_METRICS] = record["batch_metrics"]
    return values


def _is_well_formed(record: dict[str, Any]) -> bool:
    if not _is_count(record.get("seq")) or type(record.get("time")) not in (float, int):
        return False
    if record["kind"] != "metrics":
        return type(record.get("body")) is dict
    return (
        type(record.get("group")) is str
        and (record.get("steps_completed", 0.0) is None or _is_count(record.get("steps_completed")))
        and type(record.get("metrics")) is dict
        and type(record.get("batch_metrics")) in (list, type(None))
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
