"""What a master answers (§2.2), in the words of this package: snake_case, seconds, states without their prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from det_core._clock import parse_time

TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED", "DELETE_FAILED")
"""The states in which nothing happens any more."""


def plain(told: Mapping[str, Any]) -> dict[str, Any]:
    """An object of an answer: its own keys changed, what they lead to left as it is but for states, times and ids."""
    return {(key := _snake(name)): _value(key, value) for name, value in told.items()}


def state_of(name: str) -> str:
    """A state without its prefix."""
    return name.removeprefix("STATE_")


def seconds(time: Any) -> float | None:
    """A moment in seconds since the epoch, from RFC 3339; None where there is none."""
    if not isinstance(time, str) or not time:
        return float(time) if isinstance(time, int | float) else None
    return parse_time(time)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda m: "_" + m[1].lower(), name)


def _value(key: str, value: Any) -> Any:
    if key == "state" and isinstance(value, str):
        return state_of(value)
    if key.endswith("_time") or key == "timestamp":
        return seconds(value)
    return value
