"""Time, in one place, so that tests can set it."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone

now = time.time
"""Seconds since the epoch, as a float: wall time, for records that people read."""

monotonic = time.monotonic
"""Seconds that never jump, for deadlines."""


def iso(seconds: float) -> str:
    """``seconds`` since the epoch as RFC 3339 in UTC with microseconds."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")


_RFC_3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)?")


def parse_time(text: str) -> float:
    """Return an RFC 3339 time as seconds since the epoch, to the microsecond; a time without an offset is in UTC.

    Raises:
        ValueError: If the text is not such a time.
    """
    match = _RFC_3339.fullmatch(text)
    if match is None:
        raise ValueError(f"invalid time {text!r}: expected RFC 3339, such as 2024-01-31T12:00:00Z")
    date, clock, fraction, offset = match.groups(default="")
    # datetime.fromisoformat() knows neither Z nor most lengths of a fraction before Python 3.11.
    whole = datetime.fromisoformat(f"{date}T{clock}{offset.upper().replace('Z', '') or '+00:00'}")
    return whole.replace(microsecond=int(fraction[:6].ljust(6, "0"))).timestamp()
