"""Records as lines of JSON, and back.

A line is one object: ``kind``, ``seq`` (its place among the records of its process) and ``time`` (seconds
since the epoch), then for ``metrics`` the keys ``group``, ``steps_completed``, ``metrics`` and perhaps
``batch_metrics``, for every other kind ``body``. Numbers that are not finite stand as the strings of the wire
contract (§2.1), and the paths to them in ``nonfinite``, each path a list of keys and indices from the top of
the record. The first line of a file has the kind ``journal`` and says whose records follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from det_core._json import restore

if TYPE_CHECKING:
    from det_core.journal._record import Row

FLAGS = (
    orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)  # what orjson would write in a way of its own comes to the careful path instead

dumps = orjson.dumps


def encode(record: Mapping[str, Any], nonfinite: Iterable[Iterable[str | int]] = ()) -> bytes:
    """The line of a record whose values are plain already."""
    paths = [list(path) for path in nonfinite]
    return dumps({**record, "nonfinite": paths} if paths else record, None, FLAGS)


def straight(record: dict[str, Any]) -> bytes | None:
    """The line of a record if all of it is plain JSON already; None: the careful path knows more.

    orjson writes numbers that are not finite as null, without a word, so a record with a null is not plain either.
    """
    try:
        line = dumps(record, None, FLAGS)
    except TypeError:
        return None
    return None if b"null" in line or type(record["body"]) is not dict else line


def parse(line: bytes) -> dict[str, Any] | None:
    """The record on a line as it stands there, or None where the line is torn or no record of ours."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if type(record) is not dict or type(record.get("kind")) is not str:
        return None
    return record if record["kind"] == "journal" or _well_formed(record) else None


def decode(line: bytes) -> dict[str, Any] | None:
    """As :func:`parse`, with the numbers that are not finite as numbers."""
    record = parse(line)
    if record is None or record["kind"] == "journal":
        return record
    paths = record.pop("nonfinite", None)
    if paths is not None and not restore(record, paths):
        return None
    return record


def row_line(row: Row, *, superseded: bool = False) -> bytes:
    """A row read back as a line of its own, for a file that stands alone: with restart and rank.

    Args:
        row: the row.
        superseded: whether the line says if it was superseded.
    """
    from det_core.journal._plain import Plain

    plain = Plain()
    record: dict[str, Any] = {
        "group": row.group,
        "steps_completed": row.steps_completed,
        "time": row.time,
        "restart": row.restart,
        "rank": row.rank,
        "metrics": plain.mapping(row.metrics, ("metrics",)),
    }
    if superseded:
        record["superseded"] = row.superseded
    if row.batch_metrics is not None:
        record["batch_metrics"] = plain.sequence(row.batch_metrics, ("batch_metrics",))
    return encode(record, plain.nonfinite)


def _well_formed(record: dict[str, Any]) -> bool:
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
