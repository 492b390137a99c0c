"""What a run's metadata may hold: the limits of the wire contract §5.4, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_STRING_CHARS, MAX_KEY, MAX_ARRAY, MAX_DEPTH, MAX_LEAVES = 5000, 50, 100, 10, 1000
_FORBIDDEN = "$.[]"


def validate_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``metadata`` as a dictionary of its own, or every reason why not.

    Raises:
        TypeError: If it is not a mapping.
        ValueError: keys or values outside the limits; the message lists each with its path.
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
    """A copy of ``value`` and the number of leaves in it."""
    if isinstance(value, (Mapping, list, tuple)) and depth > MAX_DEPTH:
        problems.append(f"{path} is nested deeper than {MAX_DEPTH} levels")
        return None, 0
    if isinstance(value, Mapping):
        return _walk_mapping(value, path, depth, problems)
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_ARRAY:
            problems.append(f"{path} has {len(value)} items; at most {MAX_ARRAY} are allowed")
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
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY or any(c in key for c in _FORBIDDEN):
            problems.append(
                f"{path} has the key {key!r}: keys are strings of 1 to {MAX_KEY} characters "
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
        return (
            None
            if len(value) <= MAX_STRING_CHARS
            else f"is a string of {len(value)} characters; at most {MAX_STRING_CHARS}"
        )
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else "is an integer beyond 64 bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is {value}; only finite numbers can be stored"
    return f"is a {type(value).__name__}; allowed are strings, numbers, booleans, None, lists and dictionaries"
