"""Training lengths: a number of units, alone or with the unit, as in ``{"epochs": 10}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNITS = ("epochs", "records", "batches")


def split_length(length: Any) -> tuple[Any, str | None]:
    """Return the value of a length and its unit, None for a number alone; neither is checked."""
    if isinstance(length, Mapping) and len(length) == 1:
        unit, value = next(iter(length.items()))
        return value, str(unit)
    return length, None


def parse_length(length: Any, name: str) -> tuple[int, str | None]:
    """Return the value of a length and its unit, None for a number alone.

    Args:
        length: As a script gives it.
        name: The argument, for messages.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If the value is below 1, or the unit is unknown.
    """
    value, unit = split_length(length)
    if isinstance(length, Mapping) and unit not in UNITS:
        raise ValueError(f"{name}={length!r}: expected one key of {', '.join(UNITS)}, as in {{'epochs': 10}}")
    # A bool is an int to Python, and {"epochs": True} is a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={length!r}: the length must be an integer")
    if value < 1:
        raise ValueError(f"{name}={length!r}: the length must be at least 1")
    return value, unit
