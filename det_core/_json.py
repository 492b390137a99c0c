"""What JSON has no word for: numbers that are not finite, and when two values are the same.

They travel as the strings ``NaN``, ``Infinity`` and ``-Infinity`` (wire contract, section 2.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_NUMBERS = {"NaN": math.nan, "Nan": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""``Nan`` is how some clients of masters spell it."""


def encode_nonfinite(value: float) -> str:
    """The string for a number that is not finite."""
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def nonfinite_to_str(value: Any) -> Any:
    """``value`` with strings for the numbers that are not finite, at any depth; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else encode_nonfinite(value)
    if isinstance(value, Mapping):
        return {key: nonfinite_to_str(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_str(item) for item in value]
    return value


def str_to_nonfinite(value: Any) -> Any:
    """``value`` with numbers for such strings, at any depth."""
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, Mapping):
        return {key: str_to_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [str_to_nonfinite(item) for item in value]
    return value


def restore(record: Any, paths: Any) -> bool:
    """Put numbers in place of such strings where ``paths`` of keys and indices lead; False: one leads nowhere."""
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
    """``value`` as JSON in UTF-8, with such strings."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(nonfinite_to_str(value), allow_nan=False, separators=(",", ":")).encode()


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number: true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def equal_json(a: Any, b: Any) -> bool:
    """Equality at any depth, in which NaN equals NaN, and true is not 1."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_json(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_json, a, b))
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)
