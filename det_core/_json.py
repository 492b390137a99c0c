"""Plain JSON: copies of nested values, numbers that are not finite, equality.

Such numbers travel as the strings ``NaN``, ``Infinity`` and ``-Infinity`` (wire contract, section 2.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

Path = tuple["str | int", ...]
"""Keys and indices that lead to a value."""
_SCALARS = frozenset([str, int, float, bool, type(None)])
_NUMBERS = {
    "NaN": math.nan,
    "Nan": math.nan,  # some clients of masters spell it so
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}


def copy_json(
    value: Any,
    convert: Callable[[Any, Path], Any],
    *,
    key: Callable[[Any, Path], Any] | None = None,
    to_dict: Callable[[list[tuple[Any, Any]]], dict[Any, Any]] = dict,
    path: Path = (),
) -> Any:
    """Return a copy of a value with dicts and lists for mappings, lists and tuples, at any depth.

    Args:
        value: Any value. Where it contains itself, ``convert`` must raise.
        convert: Returns a replacement for a value at a path, or raises; called before the items of the replacement.
        key: Returns a replacement for a key of the mapping at a path, or raises. Defaults to the key itself.
        to_dict: Makes a dict of keys with their copied items.
        path: Path of ``value``.
    """

    def copy(value: Any, path: Path) -> Any:
        value = convert(value, path)
        # Asked first because an ABC's answer takes as long as all the rest, and nearly all values are of these.
        if type(value) in _SCALARS:
            return value
        if isinstance(value, Mapping):
            names = value if key is None else [key(name, path) for name in value]
            items = zip(names, value.values(), strict=True)
            return to_dict([(name, copy(item, (*path, name))) for name, item in items])
        if isinstance(value, list | tuple):
            return [copy(item, (*path, index)) for index, item in enumerate(value)]
        return value

    return copy(value, path)


def to_builtin(value: Any, path: Path = ()) -> Any:
    """Return an array or a scalar of numpy or torch as lists and numbers; any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def encode_nonfinite(value: float) -> str:
    """Return the string for a number that is not finite."""
    if value != value:
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def nonfinite_to_str(value: Any) -> Any:
    """Return a copy with strings for the numbers that are not finite, at any depth; tuples become lists."""
    return copy_json(value, _encode_if_nonfinite)


def _encode_if_nonfinite(value: Any, path: Path) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return encode_nonfinite(value)
    return value


def str_to_nonfinite(value: Any) -> Any:
    """Return a copy with numbers for such strings, at any depth."""
    return copy_json(value, _decode_if_nonfinite)


def _decode_if_nonfinite(value: Any, path: Path) -> Any:
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def restore(record: Any, paths: Any) -> bool:
    """Put numbers in place of such strings at ``paths``; return whether each path led to one."""
    try:
        for *way, last in paths:
            at = record
            for key in way:
                at = at[key]
            at[last] = _NUMBERS[at[last]]
    except (LookupError, TypeError, ValueError):
        return False
    return True


def dump(value: Any) -> bytes:
    """Return a value as JSON in UTF-8, with such strings."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        # Nearly every value is finite, and the C encoder finds one that is not faster than a copy would.
        return json.dumps(nonfinite_to_str(value), allow_nan=False, separators=(",", ":")).encode()


def is_number(value: Any) -> bool:
    """Return whether a value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def equal_json(a: Any, b: Any) -> bool:
    """Return whether two values are equal at any depth, where NaN equals NaN, and true does not equal 1."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_json(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_json, a, b))
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)
