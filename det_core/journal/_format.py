"""The format of a journal: records as lines of JSON, and back.

A line is one object: ``kind``, ``seq`` (its place among the records of its process) and ``time`` (seconds since the
epoch), then for ``metrics`` the keys ``group``, ``steps_completed``, ``metrics`` and perhaps ``batch_metrics``, for
every other kind ``body``. Numbers that are not finite are stored as the strings of the wire contract (§2.1), and the
paths to them in ``nonfinite``, each a list of keys and indices from the top of the record, so that they are read back
as numbers and a user's string "NaN" stays a string. ``lost`` lists values that never arrived from their device. The
first line of a file has the kind ``journal`` and names the process.

Import this module inside functions: it loads orjson, and ``from det_core import core`` loads nothing but the standard
library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from det_core._json import restore

VERSION = 1
FLAGS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
"""Options of orjson; types that it would convert in its own way are rejected, and ``_values`` converts them."""
BATCH_METRICS = "\0batch_metrics"
"""Key of the batch metrics among those of a row: a step has them once, or not at all."""

dumps = orjson.dumps


def encode(record: Mapping[str, Any], nonfinite: Iterable[Iterable[str | int]] = ()) -> bytes:
    """Return the line of a record whose values are plain JSON.

    Args:
        record: the record; numbers that are not finite are strings already.
        nonfinite: paths to these numbers.
    """
    if paths := [list(path) for path in nonfinite]:
        record = {**record, "nonfinite": paths}
    return dumps(record, None, FLAGS)


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line as it is stored, or None if the line is torn or not a record of det_core."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    # Exact types: JSON has no subclasses, and isinstance() would take true for a number.
    if type(record) is not dict or type(record.get("kind")) is not str:
        return None
    if record["kind"] != "journal" and not _is_well_formed(record):
        return None
    return record


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line with numbers that are not finite as floats, or None as :func:`parse` does."""
    record = parse(line)
    if record is None or record["kind"] == "journal":
        return record
    paths = record.pop("nonfinite", None)
    if paths is not None and not restore(record, paths):
        return None
    return record


def values_by_key(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row by key, its batch metrics among them."""
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
