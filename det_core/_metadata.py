"""Limits of a run's metadata, of the wire contract §5.4: checked by the script, and by the master."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_STRING_CHARS = 5000
MAX_KEY_CHARS = 50
MAX_ARRAY_ITEMS = 100
MAX_DEPTH = 10
MAX_LEAVES = 1000
_FORBIDDEN = "$.[]"


def validate_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a validated copy, or list every problem.

    Raises:
        TypeError: If the metadata are not a mapping.
        ValueError: If keys or values are outside the limits; the message lists each with its path.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dictionary, not {type(metadata).__name__}")
    problems: list[str] = []
    copy, leaves = _walk(metadata, "metadata", 1, problems)
    if leaves > MAX_LEAVES:
        problems.append(f"metadata has {leaves} values; at most {MAX_LEAVES} are allowed")
    if problems:
        raise ValueError("; ".join(problems))
    return copy  # type: ignore[no-any-return]


def _walk(value: Any, path: str, depth: int, problems: list[str]) -> tuple[Any, int]:
    """Return a copy of a value and its number of leaves."""
    if isinstance(value, (Mapping, list, tuple)) and depth > MAX_DEPTH:
        problems.append(f"{path} is nested deeper than {MAX_DEPTH} levels")
        return None, 0
    if isinstance(value, Mapping):
        return _walk_mapping(value, path, depth, problems)
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_ARRAY_ITEMS:
            problems.append(f"{path} has {len(value)} items; at most {MAX_ARRAY_ITEMS} are allowed")
            return None, 0
        walked = [_walk(v, f"{path}[{i}]", depth + 1, problems) for i, v in enumerate(value)]
        return [copy for copy, _ in walked], sum(leaves for _, leaves in walked)
    if reason := _leaf_problem(value):
        problems.append(f"{path} {reason}")
    return value, 1


def _walk_mapping(value: Mapping[Any, Any], path: str, depth: int, problems: list[str]) -> tuple[Any, int]:
    copy: dict[str, Any] = {}
    leaves = 0
    for key, item in value.items():
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS or any(c in key for c in _FORBIDDEN):
            problems.append(
                f"{path} has the key {key!r}: keys are strings of 1 to {MAX_KEY_CHARS} characters "
                f"without any of {_FORBIDDEN!r}"
            )
            continue
        copy[key], n = _walk(item, f"{path}[{key!r}]", depth + 1, problems)
        leaves += n
    return copy, leaves


def _leaf_problem(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        if len(value) > MAX_STRING_CHARS:
            return f"is a string of {len(value)} characters; at most {MAX_STRING_CHARS}"
    elif isinstance(value, int):
        # Beyond them JSON readers of other languages lose digits without an error.
        if not -(2**63) <= value < 2**64:
            return "is an integer beyond 64 bits"
    elif isinstance(value, float):
        if not math.isfinite(value):
            return f"is {value}; only finite numbers can be stored"
    else:
        return f"is a {type(value).__name__}; allowed are strings, numbers, booleans, None, lists and dictionaries"
    return None
