"""Records of a master as JSON of the wire protocol, and back.

Python has snake_case keys, times in seconds since the epoch, states without a prefix, and None; the wire has camelCase,
RFC 3339, ``STATE_``, and leaves None out. Only the keys of a record are renamed: what they lead to is data of users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from det_core._clock import iso, parse_time

R = TypeVar("R")

STATE_PREFIX = "STATE_"
INT64_KEYS = frozenset(["size", "length", "operation_length"])
"""Keys of 64-bit integers, which travel as text."""


def on_wire(
    path: str | None = None,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    **default: Any,
) -> Any:
    """Return a field of a dataclass that is not on the wire as its name alone says.

    Args:
        path: Its name in snake_case, after those of the objects it lies in, as ``training.trial_id``. Defaults to the
            name of the field.
        encode: Conversion of a value that is sent. Defaults to that of a key of this name.
        decode: Conversion of a value that arrives.
        default: ``default`` or ``default_factory``, as of :func:`dataclasses.field`.
    """
    return field(**default, metadata={"path": path, "encode": encode, "decode": decode})


def encode(record: Any) -> dict[str, Any]:
    """Return a dataclass of :mod:`det_core.protocol.records` as the wire protocol has it."""
    kind: Any = type(record)  # mypy takes no type for hashable
    value: dict[str, Any] = {}
    for entry in _entries(kind):
        item = getattr(record, entry.attribute)
        if item is not None:
            # The records are flat; the contract nests some of their fields.
            place = value
            for name in entry.parents:
                place = place.setdefault(name, {})
            place[entry.name] = entry.encode(item)
    return value


def decode(kind: type[R], value: Mapping[str, Any]) -> R:
    """Return an object of an answer as a dataclass: the inverse of :func:`encode`.

    What is missing gets the field's default, and what the class does not know is ignored: masters of other versions
    send more or less.
    """
    hashable: Any = kind
    items = {}
    for entry in _entries(hashable):
        place: Any = value
        for name in (*entry.parents, entry.name):
            place = place.get(name) if isinstance(place, Mapping) else None
        if place is not None:
            items[entry.attribute] = entry.decode(place)
    return kind(**items)


@dataclass(frozen=True)
class _Entry:
    attribute: str
    parents: tuple[str, ...]
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def _entries(kind: Any) -> tuple[_Entry, ...]:
    """Return where the fields of a dataclass are on the wire, and how they are converted."""
    entries = []
    for attribute in fields(kind):
        *parents, name = map(_to_camel, (attribute.metadata.get("path") or attribute.name).split("."))
        to_wire, from_wire = _conversions(attribute.name)
        entries.append(
            _Entry(
                attribute.name,
                tuple(parents),
                name,
                attribute.metadata.get("encode") or to_wire,
                attribute.metadata.get("decode") or from_wire,
            )
        )
    return tuple(entries)


def _conversions(key: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return how the value of a key is sent and read."""
    if key in INT64_KEYS:
        # JavaScript's numbers end at 2**53.
        return str, int
    if key == "state":
        return lambda state: STATE_PREFIX + state, parse_state
    if _is_time(key):
        return iso, seconds
    return lambda value: value, lambda value: value


def from_wire(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of an object as a dictionary, also what no record knows; integers sent as text stay text."""
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


def _value_from_wire(key: str, value: Any) -> Any:
    if key == "state" and isinstance(value, str):
        return parse_state(value)
    if _is_time(key):
        return seconds(value)
    return value


def _is_time(key: str) -> bool:
    return key == "timestamp" or key.endswith("_time")


def _to_camel(key: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), key)


# Not cached: answers of another server could have any number of names.
def _to_snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", lambda match: "_" + match[1].lower(), name)
