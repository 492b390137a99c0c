"""What a master answers (§2.2), in the words of this package: snake_case, seconds, states without their prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

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
    text = re.sub(r"(\.\d{6})\d+", r"\1", time.replace("Z", "+00:00"))
    text = re.sub(r"\.(\d{1,5})(?=[+-]|$)", lambda m: "." + m[1].ljust(6, "0"), text)
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda m: "_" + m[1].lower(), name)


def _value(key: str, value: Any) -> Any:
    if key == "state" and isinstance(value, str):
        return state_of(value)
    if key.endswith("_time") or key == "timestamp":
        return seconds(value)
    return value
