"""Records of a master as JSON of the wire protocol, and back.

Python has snake_case keys, times in seconds since the epoch, states without a prefix, and None; the wire has camelCase,
RFC 3339, ``STATE_``, and leaves None out. Only the keys of a record are renamed: what they lead to is data of users.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from det_core._clock import iso, parse_time

STATE_PREFIX = "STATE_"
INT64_KEYS = frozenset(["size", "length", "operation_length"])
"""Keys of 64-bit integers, which travel as text."""


def to_wire(record: Mapping[str, Any], *, text: Collection[str] = INT64_KEYS, **names: str) -> dict[str, Any]:
    """Return a record as the wire protocol has it.

    Args:
        record: The record.
        text: Keys whose integers travel as text.
        names: Other names of keys on the wire, in snake_case.
    """
    return {
        _to_camel(names.get(key, key)): _value_to_wire(key, value, text)
        for key, value in record.items()
        if value is not None
    }


def from_wire(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of an answer as a record: the inverse of :func:`to_wire`, but for integers sent as text."""
    record = {}
    for name, item in value.items():
        key = _to_snake(name)
        record[key] = _value_from_wire(key, item)
    return record


def parse_state(text: str) -> str:
    """Return a state without its prefix."""
    return text.removeprefix(STATE_PREFIX)


def seconds(time: Any) -> float | None:
    """Return a time of an answer in seconds since the epoch, or None if there is none."""
    if isinstance(time, str) and time:
        return parse_time(time)
    # Masters of Determined send some times as numbers.
    return float(time) if isinstance(time, int | float) else None


def _value_to_wire(key: str, value: Any, text: Collection[str]) -> Any:
    if key == "state":
        return STATE_PREFIX + value
    if _is_time(key):
        return iso(value)
    if key in text:
        return str(value)
    return value


def _value_from_wire(key: str, value: Any) -> Any:
    if key == "state" and isinstance(value, str):
        return parse_state(value)
    if _is_time(key):
        return seconds(value)
    return value


def _is_time(key: str) -> bool:
    return key == "timestamp" or key.endswith("_time")


@cache
def _to_camel(key: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), key)


# Not cached: answers of another server could have any number of names.
def _to_snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", lambda match: "_" + match[1].lower(), name)
