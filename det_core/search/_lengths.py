"""How long a trial trains."""

from __future__ import annotations

from collections.abc import Mapping


def units_of(length: int | Mapping[str, int]) -> int:
    """A length of the configuration, ``100`` or ``{"batches": 100}``, as a number of units."""
    if isinstance(length, Mapping):
        (length,) = length.values()
    return int(length)
