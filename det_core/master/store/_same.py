"""Equality of what was reported."""

from __future__ import annotations

from typing import Any


def same(a: Any, b: Any) -> bool:
    """Equality in which NaN equals NaN, at any depth, and a bool is no number."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)
