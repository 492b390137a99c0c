"""The limits of a run's metadata (§5.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from det_core.master._errors import Invalid

TEXT, KEY, ITEMS, DEPTH, LEAVES = 5000, 50, 100, 10, 1000


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata, if they can be kept.

    Raises:
        Invalid: they are beyond a limit; the message says where.
    """
    leaves = _check(metadata, "metadata", 1)
    if leaves > LEAVES:
        raise Invalid(f"metadata have {leaves} values, and at most {LEAVES} are kept")
    return dict(metadata)


def _check(value: Any, where: str, depth: int) -> int:
    """How many leaves a value has."""
    if isinstance(value, Mapping):
        _check_depth(where, depth)
        return sum(_check(item, _member(where, key), depth + 1) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        _check_depth(where, depth)
        if len(value) > ITEMS:
            raise Invalid(f"{where} has {len(value)} items, and at most {ITEMS} are kept")
        return sum(_check(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value))
    if isinstance(value, str) and len(value) > TEXT:
        raise Invalid(f"{where} has {len(value)} characters, and at most {TEXT} are kept")
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise Invalid(f"{where} is a {type(value).__name__}: only text, numbers, true, false and null are kept")
    return 1


def _check_depth(where: str, depth: int) -> None:
    if depth > DEPTH:
        raise Invalid(f"{where} is nested more than {DEPTH} deep")


def _member(where: str, key: Any) -> str:
    if not isinstance(key, str) or not key or len(key) > KEY or any(c in key for c in "$.[]"):
        raise Invalid(f"{where}: a key must be text of 1 to {KEY} characters without $ . [ ], not {key!r:.80}")
    return f"{where}.{key}"
